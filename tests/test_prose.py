"""The project's Markdown is of at most 120 columns; the pages that everyone reads have short sentences."""

import pytest
from prose import PROJECT, count_words, pages, sentences, too_long, wrapped

SHORT = ("README.md", "CONTRIBUTING.md", "docs/methods-of-your-own.md", "docs/dependencies.md")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(PROJECT)))
def test_lines_have_at_most_120_columns(page):
    long = too_long(page.read_text())
    assert not long, f"{len(long)} long lines (`make wrap` wraps them), the first: {long[0]}"


@pytest.mark.parametrize("name", SHORT)
def test_sentences_are_short(name):
    lengths = {sentence: count_words(sentence) for sentence in sentences((PROJECT / name).read_text())}
    assert [sentence for sentence, words in lengths.items() if words > 40] == []
    assert sum(lengths.values()) / len(lengths) < 18


def test_wrapping_leaves_tables_code_and_addresses_alone_and_is_done_once():
    words = "word " * 40 + "end"
    left = [
        f"# A title {words}",
        f"| a | {words} |",
        f"    code {words}",
        words.upper(),
        f"[x](https://a.b/{'x' * 130})",
    ]
    text = (
        f"{left[0]}\n\n{words}\nand more\n\n- {words}\n- two\n\n{left[1]}\n\n{left[2]}\n\n"
        f"```\n{left[3]}\n```\n\n{left[4]}\n\n1. {words}\n   and more\n"
    )
    once = wrapped(text)
    assert too_long(text) and not too_long(once) and wrapped(once) == once
    assert once.split() == text.split() and set(left) <= set(once.splitlines())
    assert any(line.startswith("  word") for line in once.splitlines())


@pytest.mark.parametrize("mark", ["-", "3.", "| x", "# x", "> x"])
def test_no_line_begins_as_an_item_or_a_table_by_wrapping(mark):
    for length in range(1, 12):
        text = f"{'x' * length} {'four ' * 22}{mark} {'four ' * 22}\n"
        assert not any(line.startswith(mark) for line in wrapped(text).splitlines())
        assert wrapped(wrapped(text)) == wrapped(text)


def test_sentences_are_counted_without_code_and_marks():
    assert sentences("One *two* `a b c`. Three [four](five/six) (seven).\n\n| no | table |\n") == [
        "One two CODE.",
        "Three four (seven).",
    ]
    assert count_words("One two CODE, 3.5 % of x.") == 6
