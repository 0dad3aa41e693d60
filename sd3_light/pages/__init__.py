"""HTML pages: jinja2 templates, styles and scripts, rendered into single self-contained files.

A page loads nothing over the network and stays readable without its script. `templates/components` has one macro file
per thing (chart, tiles, grid, table, card), so several pages can share them.
"""

from sd3_light.pages.charts import Chart, ChartLine, ChartMark
from sd3_light.pages.html import READ_ONLY, check_output_path, data_uri, render_template, save_page, tint_masked

__all__ = [
    "READ_ONLY",
    "Chart",
    "ChartLine",
    "ChartMark",
    "check_output_path",
    "data_uri",
    "render_template",
    "save_page",
    "tint_masked",
]
