"""A machine as one self-contained SVG: colours by kind of link, widths by bandwidth, all figures as tooltips."""

from collections.abc import Mapping
from math import log2
from typing import Any
from xml.sax.saxutils import escape

from topo_opt.topology.drawing.layout import BOX_HEIGHT, MARGIN, ROW, Box, Layout, lay_out
from topo_opt.topology.graph import link_graph
from topo_opt.topology.schema import Link, Topology

_FILL = {
    "gpu": "#d7ecc8",
    "cpu": "#fbe3c0",
    "nvswitch": "#c3e6b5",
    "pcie_switch": "#d5e3f5",
    "root_complex": "#e6dcf2",
    "numa": "#fdf1d6",
    "nic": "#f7d9d9",
    "net_switch": "#f0c9c9",
}
_STROKE = {
    "nvlink": "#4c9a2a",
    "xgmi": "#c0392b",
    "hccs": "#b5471d",
    "c2c": "#7a9e1f",
    "pcie": "#3b6fb6",
    "fabric": "#8a63b8",
    "smp": "#c98a1b",
    "network": "#b04a5a",
}
_NARROWEST = 2e9  # bytes per second of a line of one pixel; each doubling adds the same width
_LEGEND_ROW = 18.0


def draw(
    topology: Topology,
    load: Mapping[tuple[str, str], float] | None = None,
    *,
    machines: int | None = None,
) -> str:
    """The picture.

    Args:
        load: for pairs of neighbours (from, to) how busy the link is, 0 to 1; loaded links are red, others grey.
        machines: how many machines of a cluster are drawn, by default two where there are more than four.
    """
    layout = lay_out(topology, machines)
    legend = _legend(topology)
    height = layout.height + _LEGEND_ROW * len(legend) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width:.0f} {height:.0f}" '
        f'width="{layout.width:.0f}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{layout.width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        *_title(topology, layout),
        *_lines(topology, layout, load),
        *(_box(box, topology, bool(layout.labels)) for box in layout.boxes.values()),
        *(_text(x, y, name, size=11, anchor="start", weight="bold") for name, x, y in layout.labels),
        *_legend_parts(legend, layout),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(topology: Topology, layout: Layout) -> list[str]:
    models = sorted({topology.device(name).model for name in topology.compute})
    said = f"{len(topology.compute)} x {', '.join(models)}"
    if layout.hidden:
        said += f"; {layout.hidden} more machines are not drawn"
    most = int(layout.width / 6.9)
    return [
        _text(MARGIN, 28, topology.name, size=17, anchor="start", weight="bold"),
        _text(MARGIN, 46, _short(topology.description, most), size=12, anchor="start", colour="#444444"),
        _text(MARGIN, 62, _short(said, most), size=12, anchor="start", colour="#444444"),
    ]


def _lines(topology: Topology, layout: Layout, load: Mapping[tuple[str, str], float] | None) -> list[str]:
    graph = link_graph(topology)
    out = []
    # Wide lines first, so that narrow ones stay visible.
    for link in sorted(topology.links, key=lambda link: -link.bytes_per_s.value):
        a, b = (layout.boxes.get(end) for end in link.ends)
        if a is None or b is None or graph.edges[link.ends]["kind"] != link.kind:
            continue
        colour, opacity = _STROKE[link.kind], 0.75
        if load is not None:
            busy = max(load.get(link.ends, 0.0), load.get(link.ends[::-1], 0.0))
            colour, opacity = _heat(busy), 0.25 + 0.65 * min(busy, 1.0)
        style = f'stroke="{colour}" stroke-width="{_stroke_width(link):.1f}" stroke-opacity="{opacity:.2f}" fill="none"'
        out.append(
            f'<path d="{_path(a, b, layout.boxes)}" {style}><title>{escape(_says(link))}</title></path>'
        )
    return out


def _path(a: Box, b: Box, boxes: Mapping[str, Box]) -> str:
    if a.y == b.y:
        left, right = (a, b) if a.x < b.x else (b, a)
        crossed = any(
            box.y == a.y and left.x < box.x < right.x and box.kind == a.kind for box in boxes.values()
        )
        if a.kind != "gpu" and not crossed:
            return f"M{left.x + left.width / 2:.1f} {a.y:.1f} L{right.x - right.width / 2:.1f} {b.y:.1f}"
        # Over the row for GPUs, under it for the bottom row of the host.
        up = -1.0 if a.kind == "gpu" else 1.0
        edge = a.y + up * BOX_HEIGHT / 2
        lift = up * min(18.0 + abs(a.x - b.x) * 0.22, 1.5 * ROW if a.kind == "gpu" else 0.9 * ROW)
        return f"M{a.x:.1f} {edge:.1f} Q{(a.x + b.x) / 2:.1f} {edge + 2 * lift:.1f} {b.x:.1f} {edge:.1f}"
    upper, lower = (a, b) if a.y < b.y else (b, a)
    # A wide box is met straight above or below the narrow one.
    x_up = min(max(lower.x, upper.x - upper.width / 2 + 6), upper.x + upper.width / 2 - 6)
    x_low = min(max(upper.x, lower.x - lower.width / 2 + 6), lower.x + lower.width / 2 - 6)
    if upper.width > lower.width:
        x_low = lower.x
    else:
        x_up = upper.x
    return f"M{x_up:.1f} {upper.y + BOX_HEIGHT / 2:.1f} L{x_low:.1f} {lower.y - BOX_HEIGHT / 2:.1f}"


def _box(box: Box, topology: Topology, several: bool) -> str:
    # In the block of a machine its name need not stand in every box.
    short = box.name.partition(".")[2] if several and box.kind != "net_switch" else box.name
    label = _short(short, int(box.width / 6.0))
    left, top = box.x - box.width / 2, box.y - BOX_HEIGHT / 2
    rect = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{BOX_HEIGHT}" rx="4" '
        f'fill="{_FILL[box.kind]}" stroke="#555555" stroke-width="0.8"/>'
    )
    tip = escape(f"{box.name}: {_model(box, topology)}")
    return f"<g><title>{tip}</title>{rect}{_text(box.x, box.y + 4, label, size=11)}</g>"


def _model(box: Box, topology: Topology) -> str:
    for device in topology.devices:
        if device.id == box.name:
            return device.model
    return next((node.model for node in topology.nodes if node.id == box.name and node.model), box.kind)


def _legend(topology: Topology) -> list[tuple[str, Link]]:
    found: dict[tuple[str, float, int | None], Link] = {}
    for link in topology.links:
        found.setdefault((link.kind, link.bytes_per_s.value, link.lanes), link)
    return [
        (_says(link, ends=False), link)
        for link in sorted(found.values(), key=lambda link: list(_STROKE).index(link.kind))
    ]


def _legend_parts(legend: list[tuple[str, Link]], layout: Layout) -> list[str]:
    out, y = [], layout.height + MARGIN / 2
    for said, link in legend:
        style = (
            f'stroke="{_STROKE[link.kind]}" stroke-width="{_stroke_width(link):.1f}" stroke-opacity="0.75"'
        )
        out.append(f'<path d="M{MARGIN:.0f} {y:.1f} h44" {style}/>')
        out.append(_text(MARGIN + 54, y + 4, said, size=11, anchor="start"))
        y += _LEGEND_ROW
    return out


def _says(link: Link, *, ends: bool = True) -> str:
    parts = [f"{link.ends[0]} - {link.ends[1]}: "] if ends else []
    parts.append(f"{link.kind} {link.bytes_per_s.value / 1e9:.4g} GB/s each way")
    if link.sustained_bytes_per_s is not None:
        parts.append(f", sustained {link.sustained_bytes_per_s.value / 1e9:.4g}")
    if link.lanes is not None:
        parts.append(f", {link.lanes} lanes")
    if link.latency_ns is not None:
        parts.append(f", {link.latency_ns.value:.4g} ns")
    return "".join(parts)


def _stroke_width(link: Link) -> float:
    return min(max(1.0, 1.0 + 0.95 * log2(max(link.bytes_per_s.value / _NARROWEST, 1.0))), 11.0)


def _heat(busy: float) -> str:
    share = min(max(busy, 0.0), 1.0)
    cold, hot = (150, 150, 150), (210, 30, 30)
    return "#" + "".join(f"{round(c + (h - c) * share):02x}" for c, h in zip(cold, hot))


def _text(
    x: float,
    y: float,
    text: Any,
    *,
    size: int,
    anchor: str = "middle",
    colour: str = "#111111",
    weight: str = "normal",
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(str(text))}</text>'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(most - 1, 1)] + "…"
