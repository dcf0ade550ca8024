"""The page in a real browser."""

import html
import shutil
import subprocess

import pytest
from report_runs import sample_rows, write_rows, write_run

from octavo.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"),
)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_the_page_without_a_complaint(tmp_path):
    folder = write_run(tmp_path / "a", exact=False)
    hostile = "</div></table><script>document.title = 'taken'</script><b>"
    write_rows(folder / "samples.jsonl", sample_rows(0, hostile))
    path = write_report([folder], None)
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", path.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in result.stderr, result.stderr
    assert "<title>octavo: a</title>" in result.stdout
    assert f'<div class="text">{html.escape(hostile, quote=False)} (1)</div>' in result.stdout
    assert result.stdout.rstrip().endswith("</html>") and result.stdout.count("<svg role") > 10
