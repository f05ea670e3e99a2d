"""The list of requirements and the tests that cite it fit each other."""

from __future__ import annotations

import re

import pytest

from tests.house import citations


def test_every_cited_requirement_is_in_the_list():
    known = citations.requirements((citations.TESTS / "requirements.txt").read_text())
    assert sorted(citations.all_cited() - set(known)) == []
    assert all(re.fullmatch(r"[A-Z]\d\d", name) for name in known)


def test_citations_are_read_from_marks():
    source = "import pytest\n@pytest.mark.req('A01', 'B02')\ndef test_x(): ...\npytestmark = [pytest.mark.req('C03')]\n"
    assert citations.cited(source) == {"A01", "B02", "C03"}
    with pytest.raises(AssertionError):
        citations.requirements("A01 one\nA01 two\n")
