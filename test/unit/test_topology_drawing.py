"""Pictures: every part is there, nothing covers anything else, and what is not drawn is said."""

from itertools import combinations
from xml.etree import ElementTree

import pytest

from topo_opt import topology
from topo_opt.topology.drawing import draw
from topo_opt.topology.drawing.layout import BOX_HEIGHT, lay_out

SVG = "{http://www.w3.org/2000/svg}"
SMALL = [name for name in topology.names() if len(topology.load(name).compute) <= 16]


def titles(picture, tag):
    root = ElementTree.fromstring(picture)
    return [title.text for element in root.iter(f"{SVG}{tag}") for title in element.findall(f"{SVG}title")]


@pytest.mark.parametrize("name", SMALL)
def test_every_node_and_link_is_drawn(name):
    machine = topology.load(name)
    picture = draw(machine)
    ids = {*(device.id for device in machine.devices), *(node.id for node in machine.nodes)}
    assert {title.partition(":")[0] for title in titles(picture, "g")} == ids
    assert len(titles(picture, "path")) == len(machine.links)


@pytest.mark.parametrize("name", topology.names())
def test_boxes_do_not_cover_each_other_and_lie_inside(name):
    layout = lay_out(topology.load(name))
    for a, b in combinations(layout.boxes.values(), 2):
        assert abs(a.y - b.y) >= BOX_HEIGHT or abs(a.x - b.x) >= (a.width + b.width) / 2 - 0.01, (a, b)
    for box in layout.boxes.values():
        assert box.x - box.width / 2 >= 0 and box.x + box.width / 2 <= layout.width
        assert box.y - BOX_HEIGHT / 2 >= 0 and box.y + BOX_HEIGHT / 2 <= layout.height


def test_of_a_cluster_the_first_machines_are_drawn_and_the_others_said():
    machine = topology.load("hgx-h100-x8-ib-x16")
    picture = draw(machine)
    drawn = {title.partition(":")[0] for title in titles(picture, "g")}
    assert {"node0.gpu0", "node1.nic7", "leaf0.rail3", "spine"} <= drawn and "node2.gpu0" not in drawn
    assert "14 more machines are not drawn" in picture
    assert "node15.gpu7" in draw(machine, machines=16)


def test_wider_links_have_wider_lines():
    root = ElementTree.fromstring(draw(topology.load("hgx-h100-x8")))
    widths = {}
    for path in root.iter(f"{SVG}path"):
        for title in path.findall(f"{SVG}title"):
            widths[title.text.split(": ")[1].split()[0]] = float(path.get("stroke-width"))
    assert widths["nvlink"] > widths["fabric"] > widths["smp"] > widths["pcie"]


def test_load_colours_links():
    machine = topology.load("l20-x8-pcie")
    root = ElementTree.fromstring(draw(machine, {("gpu0", "switch0"): 1.0, ("switch0", "bridge0"): 0.5}))
    colours = {
        title.text.split(":")[0]: path.get("stroke")
        for path in root.iter(f"{SVG}path")
        for title in path.findall(f"{SVG}title")
    }
    assert colours["gpu0 - switch0"] == "#d21e1e"
    assert colours["gpu1 - switch0"] == "#969696"
    assert colours["switch0 - bridge0"] not in ("#d21e1e", "#969696")


def test_text_from_elsewhere_is_escaped():
    machine = topology.load("h200-x1").model_copy(update={"description": "<script>alert('&')</script>"})
    assert "<script>" not in draw(machine)
    ElementTree.fromstring(draw(machine))
