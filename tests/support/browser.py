"""Debian's Chromium without a window, driven by Playwright, on the pages of real servers.

Playwright's own browsers are never downloaded. Its loop runs in the thread that starts it until it is stopped, so a
browser lives no longer than a module of tests: `asyncio.run` of other tests would refuse.
"""

import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

PROGRAM = "chromium"
ARGUMENTS = [
    "--no-sandbox",  # root's
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE = {"width": 2300, "height": 1300}
"""Wide enough for all columns: the UI makes no cell for what is out of sight."""
LOAD_MILLISECONDS = 90_000
SETTLE_MILLISECONDS = 2_500
ASSISTANT_WAS_SHOWN = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
"""Else MLflow's assistant opens over a part of the first page."""


@contextmanager
def chromium():
    """A browser; tests that need one skip themselves where there is none."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"no {PROGRAM}; on Debian, as root: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def new_page(browser, viewport=WIDE):
    """A page with nothing remembered from another."""
    context = browser.new_context(viewport=viewport)
    context.set_default_timeout(LOAD_MILLISECONDS)
    context.add_init_script(ASSISTANT_WAS_SHOWN)
    yield context.new_page()
    context.close()


def take(page, file):
    """A picture of what a window would show."""
    page.wait_for_timeout(SETTLE_MILLISECONDS)  # fonts, charts that grow, and nothing that tells when they are done
    page.screenshot(path=file)


class RunsPage:
    """The table or the charts of an experiment's runs in the MLflow UI."""

    def __init__(self, page, address):
        self._page = page
        page.goto("about:blank")  # an address that differs behind its # alone would not be loaded anew
        page.goto(address)

    def hide_banner(self):
        """Take away the words that a view is shared."""
        self._page.get_by_label("Hide banner").click()

    def run_ids(self):
        """Of the table's rows, from above."""
        self._page.locator(".ag-row [col-id='attributes.`Run Name`']").first.wait_for()
        rows = self._page.locator(".ag-row[row-id]")  # each twice: what is pinned at the left, and the rest
        found = rows.evaluate_all(
            "rows => rows.map(row => [+row.getAttribute('row-index'), row.getAttribute('row-id')])"
        )
        return [run_id for _, run_id in sorted({tuple(row) for row in found})]

    def heads(self):
        """Names of the columns that are in sight, from the left."""
        cells = self._page.locator(".ag-header-cell[col-id]")
        cells.first.wait_for()
        found = cells.evaluate_all(
            "cells => cells.map(cell => [cell.getBoundingClientRect().x, cell.innerText.trim()])"
        )
        return [text for _, text in sorted(found) if text]

    def cell(self, run_id, column):
        """The text of a run's column, such as "metrics.`speedup/ratio`"."""
        return self._page.locator(f'.ag-row[row-id="{run_id}"] [col-id="{column}"]').inner_text().strip()

    def bars(self, title):
        """How many bars a chart has."""
        return self._marks(title, ".bars .point")

    def points(self, title):
        """How many points the lines of a chart have."""
        return self._marks(title, ".scatterlayer .point")

    def _marks(self, title, mark):
        cards = self._page.get_by_test_id("experiment-view-compare-runs-card")
        card = cards.filter(has=self._page.get_by_text(title, exact=True)).first
        card.scroll_into_view_if_needed()
        card.locator(mark).first.wait_for()
        return card.locator(mark).count()
