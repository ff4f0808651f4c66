"""What the check of the rooms finds."""

import pathlib
import tempfile
import unittest

import check_rooms


class Rooms(unittest.TestCase):
    def complaints(self, files, not_known=(), tree="house", rows=()):
        with tempfile.TemporaryDirectory() as root:
            page = pathlib.Path(root, check_rooms.MAP)
            page.parent.mkdir()
            page.write_text("".join(f"| `{row}/` | a room |\n" for row in rows))
            for name, includes in files.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f'#include "{other}"\n' for other in includes))
            return list(check_rooms.complaints(pathlib.Path(root), [tree], not_known))

    def test_rooms_in_order_are_fine(self):
        self.assertEqual(self.complaints({"house/main.cpp": ["house/attic/a.h"], "house/attic/a.h": ["house/cellar/b.h"],
                                          "house/cellar/b.h": []}), [])

    def test_two_rooms_that_know_each_other_are_named_with_their_files(self):
        said = self.complaints({"house/attic/a.h": ["house/cellar/b.h"], "house/cellar/b.h": [],
                                "house/cellar/c.cpp": ["house/attic/a.h"]})
        self.assertEqual(said, ["rooms that know each other: house/attic -> house/cellar -> house/attic (house/attic/a.h "
                                "includes house/cellar/b.h; house/cellar/c.cpp includes house/attic/a.h)"])

    def test_whole_folders_are_compared_however_deep_their_files_lie(self):
        said = self.complaints({"house/attic/box/a.h": ["house/cellar/b.h"], "house/cellar/b.h": [],
                                "house/cellar/shelf/c.cpp": ["house/attic/d.h"], "house/attic/d.h": []})
        self.assertEqual(said, ["folders of house/ that know each other: attic -> cellar -> attic (house/attic/box/a.h "
                                "includes house/cellar/b.h; house/cellar/shelf/c.cpp includes house/attic/d.h)"])

    def test_an_include_that_runs_down_the_map_is_named(self):
        files = {"house/attic/a.h": ["house/cellar/b.h"], "house/cellar/b.h": []}
        self.assertEqual(self.complaints(files, rows=["house/cellar", "house/attic"]), [])
        self.assertEqual(self.complaints(files, rows=["house/attic", "house/cellar"]), [
            "house/attic/a.h includes house/cellar/b.h, whose folder stands below its own in architecture.md"])

    def test_a_header_and_its_source_are_one_unit(self):
        files = {f"house/attic/a{i}.{suffix}": [] for i in range(20) for suffix in ("h", "cpp")}
        self.assertEqual(self.complaints(files), [])
        said = self.complaints(files | {"house/attic/b.cpp": []})
        self.assertEqual(said, ["house/attic: 21 units, at most 20 may lie in one folder"])

    def test_what_must_not_be_known_is_found_behind_other_headers(self):
        files = {"house/attic/a.cpp": ["house/attic/a.h"], "house/attic/a.h": ["house/cellar/b.h"],
                 "house/cellar/b.h": ["house/loop.h"], "house/loop.h": []}
        said = self.complaints(files, [(["house/attic/"], ["house/loop"])])
        self.assertEqual(said, ["house/attic/ may not know house/loop.h: "
                                "house/attic/a.cpp -> house/attic/a.h -> house/cellar/b.h -> house/loop.h"])

    def test_a_library_of_the_workers_is_included_by_its_own_name(self):
        said = self.complaints({"workers/ddp/attic/a.h": ["ddp/cellar/b.h"], "workers/ddp/cellar/b.h": ["ddp/attic/a.h"]},
                               tree="workers/ddp")
        self.assertIn("workers/ddp/attic -> workers/ddp/cellar -> workers/ddp/attic", said[0])

    def test_a_rule_about_files_that_are_gone_is_wrong(self):
        self.assertEqual(self.complaints({"house/a.h": []}, [(["house/attic/"], ["house/loop"])]),
                         ["house/attic/: there is no such file"])

    def test_a_call_of_the_standard_library_that_throws_is_named_with_its_line(self):
        with tempfile.TemporaryDirectory() as root:
            tree = pathlib.Path(root, "house")
            tree.mkdir()
            (tree / "fine.cpp").write_text("// std::stoi(text)\nstd::error_code gone;\nstd::thread::id id;\nstd::vector<std::thread> all;\n"
                                           "std::filesystem::absolute(f(a, b), gone);\nstd::filesystem::path(name).stem();\n")
            (tree / "wrong.cpp").write_text("std::error_code gone;\nstd::filesystem::is_directory(f(a, gone));\nstd::stoi(text);\n"
                                            "std::thread([] {}).detach();\nstd::async(run);\n"
                                            "std::filesystem::directory_iterator(place, gone);\n")
            said = list(check_rooms.throwing_calls(pathlib.Path(root), ["house"]))
            self.assertEqual([line.split(": ")[0] for line in said],
                             [f"house/wrong.cpp:{line}" for line in (4, 5, 3, 6, 2)])
            self.assertEqual(said[-1], "house/wrong.cpp:2: std::filesystem::is_directory throws: give it a std::error_code")

    def test_a_file_in_the_root_that_is_not_on_the_list_is_named_unless_git_ignores_it(self):
        with tempfile.TemporaryDirectory() as root:
            tree = pathlib.Path(root)
            (tree / ".gitignore").write_text("/build*/\n/checkpoints/\n")
            for name in ("README.md", "build-test", "worker.80s-19356,vm.btr"):
                (tree / name).touch()
            self.assertEqual(list(check_rooms.strays(tree, {".gitignore", "README.md"})),
                             ["worker.80s-19356,vm.btr lies in the root: remove it, or add it to IN_ROOT of tests/support/check_rooms.py"])


if __name__ == "__main__":
    unittest.main()
