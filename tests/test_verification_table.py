"""docs/verification.md says what the sabotage tests do."""

from tests.verification_table import PAGE, rows, tables


def test_the_page_is_the_lists():
    found = PAGE.read_text(encoding="utf-8")
    assert found[found.index("### ") :] == tables(), "run: python -m tests.verification_table"


def test_there_are_enough_and_each_has_a_name_of_its_own():
    names = [row[0] for found in rows().values() for row in found]
    assert len(set(names)) == len(names) >= 100
