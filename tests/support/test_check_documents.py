"""What the check of the documents finds."""

import pathlib
import tempfile
import unittest

import check_documents

MAP = "| `launcher/head/` | the head |\n"


class Documents(unittest.TestCase):
    def complaints(self, **pages):
        """Of a tree with launcher/head/report.h and these pages in docs/."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            for name in ("docs", "rendezvous", "launcher/head"):
                (root / name).mkdir(parents=True)
            (root / "launcher/head/report.h").write_text("")
            for name in ("README.md", "CONTRIBUTING.md", "rendezvous/PROTOCOL.md"):
                (root / name).write_text("")
            for name, text in ({"architecture": MAP} | pages).items():
                (root / f"docs/{name}.md").write_text(text)
            return list(check_documents.complaints(root))

    def test_a_path_may_lack_its_suffix(self):
        self.assertEqual(self.complaints(a="`launcher/head/report.h`, `launcher/head/report`, `/launcher/x`, `a/b`"), [])

    def test_a_path_that_does_not_exist_is_named(self):
        self.assertEqual(self.complaints(a="`launcher/report`"), ["docs/a.md: launcher/report: there is no such file"])

    def test_the_page_with_the_map_may_shorten_paths_and_lists(self):
        self.assertEqual(self.complaints(architecture=MAP + "`head/report`, `launcher/head/report`, `report`"), [])
        self.assertEqual(self.complaints(architecture=MAP + "`launcher/head/report`, `gone`, `tail/report`"),
                         ["docs/architecture.md: tail/report: there is no such file",
                          "docs/architecture.md: launcher/head/gone: there is no such file"])

    def test_a_folder_without_a_row_is_named(self):
        self.assertEqual(self.complaints(architecture=""), ["docs/architecture.md: the map has no row for launcher/head/"])

    def test_a_link_needs_a_page_and_a_heading(self):
        self.assertEqual(self.complaints(a="# Its `one` way\n[b](b.md) [c](#its-one-way) [d](https://e.org/f)", b=""), [])
        self.assertEqual(self.complaints(a="[b](b.md) [c](#two)"),
                         ["docs/a.md: link b.md: there is no such page",
                          "docs/a.md: link #two: the page has no such heading"])


if __name__ == "__main__":
    unittest.main()
