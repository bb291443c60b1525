"""What a report is written as: the text, the JSON, the page and its timeline."""

import json
import re

from synthetic_trace import GEMM, STEPS, SyntheticTrace, healthy, report, tiny
from torchfast.profiling.report import report_on
from torchfast.profiling.trace import read_trace


def test_the_table_and_the_json_say_the_same(tmp_path):
    found = report(tiny(), tmp_path)

    text, data = str(found), found.to_dict()

    assert text.startswith("launch-bound: ")
    assert json.loads(json.dumps(data)) == data
    assert data["verdict"]["class"] == "launch-bound"
    assert f"{data['step_ms']:.3f} ms" in text
    assert "100% of them below 5 us" in text
    assert "Test Device" in text
    assert max(map(len, text.splitlines()[3:5])) < 400
    assert data["phases"][0]["phase"] == "forward"


def test_a_page_stands_alone_and_shows_no_foreign_markup(tmp_path):
    made = tiny()
    evil = "<script>alert('x')</script>&"
    made.kernel(12_010, 13_010, evil, at=11_000, op=evil)
    made.line(f"{evil}.py:3", -20, 20_000)
    found = report(made, tmp_path)
    path = tmp_path / "report.html"

    found.write_html(path)

    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert "launch-bound" in page
    assert "<svg" in page
    assert "<script" not in page
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", page)
    assert page.count("<rect") < 3000
    assert "#d1242f" in page.split("<svg", 1)[1]  # idle in red


def test_the_timeline_shows_streams_phases_and_idle_time(tmp_path):
    made = healthy()
    made.kernel(500, 900, "ncclDevKernel_AllReduce", stream=23)
    found = report_on(read_trace(made.write(tmp_path / "trace.json")))
    found.write_html(tmp_path / "report.html")

    drawing = (tmp_path / "report.html").read_text().split("<svg", 1)[1].split("</svg>")[0]

    for label in ("phases", "stream 7", "stream 23", "idle"):
        assert f">{label}</text>" in drawing
    assert "communication" in drawing


def test_the_times_stand_within_the_drawing(tmp_path):
    made = SyntheticTrace()
    for at in range(10):
        made.kernel(1000 * at, 1000 * at + 1020, op="aten::mm")
    made.step(0, -20, 10_100)
    report_on(read_trace(made.write(tmp_path / "trace.json"))).write_html(tmp_path / "report.html")

    texts = re.findall(
        r'<text x="([\d.]+)" y="13" text-anchor="(\w+)" class="time">',
        (tmp_path / "report.html").read_text(),
    )

    assert {side for _, side in texts} == {"start", "end"}
    for x, side in texts:
        assert (0 if side == "start" else 50) < float(x) < (1070 if side == "start" else 1121)


def test_a_path_is_not_broken_within_its_last_name(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 1000)
        made.annotation("torchfast.data_wait", begin + 1, begin + 590)
        made.line("/home/anna/train&co/loop.py:3", begin, begin + 595)
        made.kernel(begin + 600, begin + 990, GEMM, at=begin + 595)
    report(made, tmp_path).write_html(tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()

    assert "<td class=line>/<wbr>home/<wbr>anna/<wbr>train&amp;co/<wbr>loop.py:3</td>" in page


def page_of(made, tmp_path, **options):
    trace = read_trace(made.write(tmp_path / "trace.json"))
    report_on(trace, **options).write_html(tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def test_columns_that_are_empty_are_left_out_and_what_is_not_known_is_not_zero(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 1000)
        made.kernel(begin + 100, begin + 500, GEMM, at=begin + 50)
        made.kernel(begin + 600, begin + 900, GEMM, at=begin + 550)
    without = page_of(made, tmp_path)
    made.annotation("torchfast.backward", 540, 590)
    made.line("train.py:9", 0, 1000)
    some = page_of(made, tmp_path)

    for column in ("<th class=n>host ms</th>", "<th>line</th>"):
        assert column not in without
        assert column in some
    assert "<td class=n></td></tr>" in some  # the forward has no annotation
    assert "<td class=n>0.000</td></tr>" not in some
    for page in (without, some):
        for table in page.split("<table")[1:]:
            rows = table.split("</table>")[0].split("<tr>")[1:]
            assert len({row.count("<th") + row.count("<td") for row in rows}) == 1


def test_a_page_tells_what_a_step_took_before_the_profiler(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 1000)
        made.kernel(begin + 500, begin + 900, GEMM, at=begin + 450)

    assert " ms a step</p>" in page_of(made, tmp_path)
    told = page_of(made, tmp_path, untraced_us=700.0)
    assert "1.000 ms a step under the profiler, 0.700 ms before it began</p>" in told


def test_products_are_told_by_the_step_as_kernels_are(tmp_path):
    made = SyntheticTrace()
    shapes = {"dims": [[64, 64], [64, 64]], "types": ["float", "float"]}
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 1000)
        made.op("aten::mm", begin + 10, begin + 30, **shapes)
        made.kernel(begin + 100, begin + 350, GEMM, at=begin + 15)
        made.kernel(begin + 400, begin + 525, GEMM, at=begin + 40)
    page = page_of(made, tmp_path).split("Products and attention")[1]
    text = str(report(made, tmp_path)).split("products and attention")[1].splitlines()

    assert page.index("ms a step") < page.index("<td class=n>0.250</td>")
    assert "<td class=n>0.125</td>" in page
    assert [line.split(" 0.")[1][:3] for line in text[1:3]] == ["125", "250"]
    assert text[0].index("ms a step") + len("ms a step") + len("products and attention") == (
        text[1].index("0.125") + len("0.125")
    )
