"""The pages have the figures of the records: tests/performance_tables.py makes the tables."""

import performance_tables as tables
import pytest

PAGES = tables.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_tables(path):
    text = path.read_text()
    assert tables.filled(path) == text, "python tests/performance_tables.py writes them anew"
    assert text.count("<!-- table: ") == len(tables.PLACE.findall(text)), "each has its end"


def test_there_are_some():
    assert {"performance", "all_reduce"} <= {path.stem for path in PAGES}


def test_what_is_told_of_e():
    assert tables.hidden({"gemm": 100.0, "torch": 104.0, "auto": 90.0}) == tables.NONE
    assert tables.hidden({"gemm": 100.0, "torch": 120.0, "auto": 105.0}) == "0.75"


def test_other_figures_are_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("A\n\n<!-- table: swing -->\nold\n<!-- end -->\n\nB\n")
    assert " 7.278 |" in tables.filled(page) and "old" not in tables.filled(page)
    page.write_text(tables.filled(page))
    assert tables.filled(page) == page.read_text() and page.read_text().endswith("<!-- end -->\n\nB\n")
