"""What ./quickstart does on other systems than this one: its commands are stand-ins, so nothing is compiled."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

QUICKSTART = pathlib.Path(__file__).resolve().parents[2] / "quickstart"
BORROWED = ["awk", "bash", "basename", "cat", "chmod", "dirname", "env", "head", "id", "mkdir", "nproc"]

# Records its words; `meson install` leaves a program where `meson configure -Dprefix=` said.
MESON = """#!/bin/sh
echo "$*" >>meson.log
case "$1" in
    configure) echo "${3#-Dprefix=}" >prefix ;;
    install) mkdir -p "$(cat prefix)/bin"; printf '#!/bin/sh\\necho ddprun 1.2.3\\n' >"$(cat prefix)/bin/ddprun"
             chmod +x "$(cat prefix)/bin/ddprun" ;;
esac
"""


class Quickstart(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "bin").mkdir()
        for name in BORROWED:
            (self.root / "bin" / name).symlink_to(shutil.which(name))
        shutil.copy(QUICKSTART, self.root)
        self.path = str(self.root / "bin")

    def stand_in(self, name, text="#!/bin/sh\n", folder="bin"):
        program = self.root / folder / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)

    def with_meson(self):
        self.stand_in("meson", MESON)
        self.stand_in("ninja")

    def run_quickstart(self, *words):
        return subprocess.run([self.root / "quickstart", *words], capture_output=True, text=True,
                              cwd=self.root / "bin", env={"PATH": self.path, "HOME": str(self.root / "home")}, check=False)

    def test_names_the_packages_of_red_hat(self):
        self.stand_in("dnf")
        done = self.run_quickstart("build")
        self.assertEqual(done.returncode, 69)
        self.assertIn("dnf install gcc-c++ meson ninja-build pkgconf-pkg-config ccache spdlog-devel fmt-devel cli11-devel "
                      "json-devel openssl-devel openblas-devel libfabric-devel pmix-devel (", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)

    def test_names_the_packages_of_suse(self):
        self.stand_in("zypper")
        done = self.run_quickstart("build")
        self.assertEqual(done.returncode, 69)
        self.assertIn("zypper install gcc-c++ meson ninja pkgconf-pkg-config ccache spdlog-devel fmt-devel cli11-devel "
                      "nlohmann_json-devel libopenssl-3-devel libopenblas_pthreads-devel libfabric-devel pmix-devel (",
                      done.stderr)

    def test_names_the_packages_of_debian_where_neither_is_there(self):
        self.assertIn("Debian packages: g++ meson ninja-build ", self.run_quickstart("build").stderr)

    def test_installs_stripped_in_the_home_directory_and_says_what_path_lacks(self):
        self.with_meson()
        done = self.run_quickstart("install")
        self.assertEqual(done.returncode, 0, done.stderr)
        home = self.root / "home/.local"
        self.assertIn("install -C build --strip", (self.root / "meson.log").read_text())
        self.assertIn(f"installed ddprun 1.2.3 in {home}", done.stdout)
        self.assertIn(f"ddprun is not in PATH; add to your shell's profile: export PATH={home}/bin:$PATH\n", done.stdout)

    def test_says_which_other_ddprun_path_has(self):
        self.with_meson()
        self.stand_in("ddprun")
        done = self.run_quickstart("install", "../opt")
        self.assertIn(f"PATH has another one, {self.path}/ddprun; to use this one: export PATH={self.path}/../opt/bin:$PATH\n",
                      done.stdout)

    def test_says_nothing_of_path_where_it_has_that_ddprun(self):
        self.with_meson()
        self.path += f":{self.root}/opt/bin"
        done = self.run_quickstart("install", str(self.root / "opt"))
        self.assertIn("installed ddprun 1.2.3", done.stdout)
        self.assertNotIn("PATH", done.stdout)

    def test_builds_nothing_where_the_prefix_cannot_be_written(self):
        self.with_meson()
        (self.root / "file").write_text("")
        done = self.run_quickstart("install", "../file/prefix")
        self.assertEqual(done.returncode, 77)
        self.assertIn("/file/prefix; name another directory", done.stderr)
        self.assertFalse((self.root / "meson.log").exists())


if __name__ == "__main__":
    unittest.main()
