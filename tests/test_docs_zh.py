"""Chinese pages match the English pages: the same headings, code, figures, links and numbers."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
#: English pages with a Chinese version: start, guides, lesson, comparison.
TRANSLATED = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("index", "start", "models", "parallel", "benchmarks", "compare")),
    *(DOCS / f"{name}.md" for name in ("how-it-works", "adaptive")),
    *sorted((DOCS / "guides").glob("*.md")),
    *sorted((DOCS / "lesson").glob("*.md")),
]
GLOSSARY = DOCS / "zh" / "glossary.md"  # in both languages
CHINESE = [*sorted((DOCS / "zh").rglob("*.md")), ROOT / "README.zh.md"]
FULL = "，。；：、！？（）“”"
FENCED = re.compile(r"^(`{3,}).*?^\1$", re.S | re.M)
INDENTED = re.compile(r"(?:(?<=\n\n) {4}\S.*\n)(?: {4}.*\n)*")
SPAN = re.compile(r"`[^`\n]+`")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\(([^)\s]+)\)")


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def twin_of(page):
    """The Chinese version of a page."""
    if page == ROOT / "README.md":
        return ROOT / "README.zh.md"
    return DOCS / "zh" / page.relative_to(DOCS)


def prose_of(page):
    """A page without its code blocks."""
    return INDENTED.sub("", FENCED.sub("", page.read_text(encoding="utf-8")))


def targets(page):
    """Link targets of a page; translated pages count as their Chinese version, without an anchor."""
    found = []
    for link in LINK.findall(SPAN.sub("x", prose_of(page))):
        path, _, anchor = link.partition("#")
        there = link if link.startswith("http") else (page.parent / path).resolve()
        if there in TRANSLATED and page in CHINESE and twin_of(there) != page:
            found.append(f"{name_of(there)}, in English")
        elif there in TRANSLATED or there in CHINESE:
            there = twin_of(there) if there in TRANSLATED else there
            found += [name_of(there)] * (there not in (GLOSSARY, page if page in CHINESE else twin_of(page)))
        else:
            found.append(link if there == link else f"{name_of(there)}#{anchor}")
    return Counter(found)


def structure(page):
    """What must match in both languages, by its name in a failure."""
    text, prose = page.read_text(encoding="utf-8"), prose_of(page)
    words = SPAN.sub("", prose)
    return {
        "levels of headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.M)],
        "blocks of code": [match[0] for match in FENCED.finditer(text)]
        + INDENTED.findall(FENCED.sub("", text)),
        "marks of drawn and measured blocks": re.findall(r"<!--.*?-->", prose),
        "code in sentences": sorted(set(SPAN.findall(prose))),
        "figures": [
            name_of((page.parent / link).resolve()).replace(".zh.svg", ".svg")
            for link in IMAGE.findall(prose)
        ],
        "links": targets(page),
        "cells of tables": [line.count("|") for line in re.findall(r"^\|.*\|$", words, re.M)],
        "items of lists": [mark.strip()[-1] for mark in re.findall(r"^ *(?:-|\d+\.) ", prose, re.M)],
    }


def numbers(page):
    text = re.sub(r"\]\([^)]*\)", "]", SPAN.sub("", prose_of(page)))
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", text))


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_both_languages_say_the_same(page):
    twin = twin_of(page)
    assert twin.exists(), f"{name_of(page)} must have a Chinese page {name_of(twin)}"
    english, chinese = structure(page), structure(twin)
    for what, expected in english.items():
        assert chinese[what] == expected, f"{name_of(twin)} must have the {what} of {name_of(page)}"
    assert not numbers(page) - numbers(twin), f"{name_of(twin)} must have the numbers of {name_of(page)}"


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_each_page_links_to_the_other_language(page):
    for here, there, word in ((page, twin_of(page), "中文"), (twin_of(page), page, "English")):
        head = "\n".join(here.read_text(encoding="utf-8").splitlines()[:6])
        links = re.findall(rf"\[{word}\]\(([^)]+)\)", head)
        assert [(here.parent / link).resolve() for link in links] == [there], f"{name_of(here)}, first lines"


def test_every_chinese_page_has_an_english_one():
    assert set(CHINESE) == {GLOSSARY, *map(twin_of, TRANSLATED)}


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_chinese_emphasis_renders(page):
    """CommonMark does not close bold text that ends with a full-width mark before a word, and shows the asterisks."""
    shown = re.sub(r"!?\[([^\[\]]*)\]\([^)\s]*\)", r"\1", SPAN.sub("x", prose_of(page)))
    for bold, after in re.findall(r"\*\*(.+?)\*\*(.?)", shown):
        assert bold[-1] not in FULL or not re.match(r"\w", after), f"**{bold}** ends with a mark"


@pytest.mark.parametrize("figure", sorted(DOCS.rglob("*.zh.svg")), ids=name_of)
def test_figures_of_chinese_pages_are_in_chinese(figure):
    """Labels and footers; names, and texts that a model wrote, stay as they are."""
    text = figure.read_text(encoding="utf-8")
    assert figure.with_name(figure.name.replace(".zh", "")).exists()
    shown = re.findall(r"<(?:text|title)[^>]*>([^<]*)<", text)
    assert any(re.search("[\u4e00-\u9fff]", words) for words in shown)
    english = r"\b(?:in|of|rows?|cores?|threads?|path|level|step|tokens|estimated)\b"
    assert not [words for words in shown if " " in words and re.search(english, words)]


def test_chinese_pages_show_the_chinese_copy_of_a_figure():
    for page in CHINESE:
        for link in IMAGE.findall(prose_of(page)):
            figure = (page.parent / link).resolve()
            twin = figure.with_name(figure.name.replace(".svg", ".zh.svg"))
            assert figure.suffix != ".svg" or figure.name.endswith(".zh.svg") or not twin.exists(), name_of(
                page
            )


def test_the_glossary_has_every_word_of_the_lesson():
    """All terms of the table in how-it-works, in both languages; only names from the code."""
    text = GLOSSARY.read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]*) \|", prose_of(DOCS / "zh" / "how-it-works.md"), re.M)[1:]
    terms = re.findall(r"([^\n（、]+)（([a-z -]+)）", "\n".join(words))
    assert len(terms) >= 8
    for chinese, english in terms:
        row = re.search(rf"^\| {chinese.strip()}.* \| {english} \|", text, re.M)
        assert row or re.search(rf"^\| .*{chinese.strip()}.* \| .*{english}", text, re.M), (chinese, english)
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in re.findall(r"\| `(?:--)?(\w+)` \|$", text, re.M):
        assert re.search(rf"\b{name}\b", code), name
