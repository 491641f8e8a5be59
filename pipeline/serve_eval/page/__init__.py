"""What people look at: report.html and report.md of an evaluation, and the page of a decode plan.

report.py     the page, and the table on a terminal          report.html.j2, page.css
figures.py    which charts a report has, with their captions
charts.py     matplotlib drawings as SVG that follows the page's colours
markdown.py   the same for a pull request
wording.py    how numbers and keys are written
decode_page.py                                               decode_plan.html.j2
"""
