"""What ./quickstart test says last."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

import summarise

GTEST = """<testsuites><testsuite name="Logs">
<testcase name="Whole" status="run" result="completed" classname="Logs"/>
<testcase name="Off" status="notrun" result="suppressed" classname="Logs"/>
<testcase name="FullDisk" status="run" result="skipped" classname="Logs">
<skipped message="../tests/system/test_logs.cpp:190&#x0A;a tmpfs cannot be mounted here&#x0A;"><![CDATA[x]]></skipped></testcase>
</testsuite></testsuites>"""


PASSED = {"name": "ddprun:system / system logs", "result": "OK", "stdout": ""}


class Summary(unittest.TestCase):
    def said(self, folders):
        with tempfile.TemporaryDirectory() as root:
            paths = []
            for name, (tests, gtest) in folders.items():
                logs = pathlib.Path(root, name, "meson-logs")
                (logs / "gtest").mkdir(parents=True)
                (logs / "testlog.json").write_text("".join(json.dumps(test) + "\n" for test in [PASSED, *tests]))
                if gtest:
                    (logs / "gtest" / "test_logs.xml").write_text(gtest)
                paths.append(str(logs.parent))
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = summarise.main(paths)
            return code, out.getvalue().splitlines()

    def test_a_case_that_was_skipped_has_a_line_with_its_reason(self):
        code, lines = self.said({"build-test": ([], GTEST), "build-asan": ([], GTEST)})
        self.assertEqual(code, 0)
        self.assertEqual(lines, ["skipped: Logs.FullDisk: a tmpfs cannot be mounted here (build-test, build-asan)",
                                 "2 passed, 0 failed; 2 cases in them, 2 skipped"])

    def test_a_script_that_was_skipped_says_why_in_its_last_line(self):
        skipped = {"name": "ddprun:process / trace", "result": "SKIP", "stdout": "looking\nno GPU here\n"}
        self.assertEqual(self.said({"build-test": ([skipped], "")})[1],
                         ["skipped: trace: no GPU here (build-test)", "1 passed, 0 failed; 0 cases in them, 1 skipped"])

    def test_a_failure_is_named_and_is_the_exit_code(self):
        failed = {"name": "ddprun:unit / cuda", "result": "TIMEOUT", "stdout": "\x1b[32mgreen\x1b[0m"}
        code, lines = self.said({"build-tsan": ([failed], "")})
        self.assertEqual(code, 1)
        self.assertEqual(lines, ["failed: build-tsan: cuda", "1 passed, 1 failed; 0 cases in them, 0 skipped"])


if __name__ == "__main__":
    unittest.main()
