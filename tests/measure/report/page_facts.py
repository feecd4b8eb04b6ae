"""What a test asks of a report's page."""

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from jaxserve.measure.report.svg import CHARACTER, WIDTH

# Elements that load, run or send something.
ACTIVE = {
    "script", "img", "link", "iframe", "object", "embed", "video", "audio", "source", "image",
    "use", "form", "input", "base", "foreignObject", "animate", "set",
}  # fmt: skip
MARKS = {"path", "rect", "circle"}


def parse(page: str) -> ElementTree.Element:
    """Returns the page's root; raises ParseError where it is not well-formed."""
    return ElementTree.fromstring(page)


def loads(root: ElementTree.Element, page: str) -> list[str]:
    """Returns everything in the page that would ask for something, or run."""
    found = [element.tag for element in root.iter() if element.tag in ACTIVE]
    for element in root.iter():
        for name, value in element.attrib.items():
            if name in ("src", "srcset", "xlink:href", "action", "style") or name.startswith("on"):
                found.append(f"{name}={value}")
            if name == "href" and not value.startswith("#"):
                found.append(f"href={value}")
    styles = "".join(element.text or "" for element in root.iter("style"))
    found += re.findall(r"@import|url\(|expression\(", styles)
    return found + re.findall(r"""(?:src|href)\s*=\s*["']?\s*\w+:""", page)


def figures(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {figure.attrib["id"]: figure for figure in root.iter("figure")}


def num_marks(figure: ElementTree.Element) -> int:
    """Returns the drawn pieces of data: lines, dots, bars and fields of the plot itself."""
    (plot,) = (svg for svg in figure.iter("svg") if svg.attrib.get("class") == "plot")
    return sum(
        element.tag in MARKS
        and element.attrib.get("class", "").split()[0] in ("line", "bar", "area", "heat")
        for element in plot.iter()
    )


def table_rows(figure: ElementTree.Element) -> list[list[str]]:
    return [
        ["".join(cell.itertext()) for cell in row.iter("td")]
        for body in figure.iter("tbody")
        for row in body.iter("tr")
    ]


def extents(root: ElementTree.Element) -> Iterator[tuple[float, float, float, float]]:
    """Yields left, right, y and the height of its drawing for each text and piece of a plot."""
    for svg in root.iter("svg"):
        if svg.attrib.get("class") != "plot":
            continue
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        assert width == WIDTH
        for element in svg.iter():
            if "x" not in element.attrib:
                continue
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            names = element.attrib.get("class", "").split()
            wide = float(element.attrib.get("width", CHARACTER * len(element.text or "")))
            left = x - wide if "end" in names else x - wide / 2 if "mid" in names else x
            yield left, left + wide, y, height
