"""docs/diagnosing.md is what the catalogue says."""

from __future__ import annotations

import re
from pathlib import Path

from compile_guard.hazards import catalogue
from compile_guard.hazards._diagnosing import diagnosing, error_texts

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_not_stale() -> None:
    told = "run `python -m compile_guard.hazards --diagnosing > docs/diagnosing.md`"
    assert (DOCS / "diagnosing.md").read_text(encoding="utf-8") == diagnosing(), told


def test_error_texts_come_first_and_every_hazard_is_reached_by_symptom_and_finding() -> None:
    page = diagnosing()
    by_text, by_symptom, by_finding = (page.index(f"## By {what}") for what in ("error text", "symptom", "finding"))
    assert by_text < by_symptom < by_finding
    for hazard in catalogue().values():
        assert f"[{hazard.id} " in page[by_symptom:by_finding]
        assert f"[{hazard.id} " in page[by_finding:]
        for text in error_texts(hazard):
            assert text in page[by_text:by_symptom]


def test_links_lead_to_headings_of_the_other_page() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "hazards.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\(hazards\.md#([^)]+)\)", diagnosing()))
    assert links
    assert links <= anchors, "docs/hazards.md lacks a hazard: make it anew"


def test_the_best_known_message_leads_to_its_hazard() -> None:
    page = diagnosing()
    rows = [line for line in page[: page.index("## By symptom")].splitlines() if "Detected that you are using FX" in line]
    assert [row for row in rows if "[A1 " in row]
