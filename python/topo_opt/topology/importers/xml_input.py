"""XML from elsewhere: no entities, no external parts, bounded in size and depth."""

from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from topo_opt.errors import InputError

MAX_ELEMENTS = 100_000
MAX_DEPTH = 64


def parse_xml(data: bytes, what: str) -> Element:
    """The root element.

    Raises:
        InputError: it is not well-formed, declares entities, or is too large or too deep.
    """
    try:
        root = fromstring(data)
    except DefusedXmlException as error:
        raise InputError(f"{what} declares what a dump does not need: {type(error).__name__}") from None
    except ParseError as error:
        raise InputError(f"{what} is not well-formed XML: {error}") from None
    except (
        ValueError,
        LookupError,
    ) as error:  # encodings that Python does not know, or that the text does not keep to
        raise InputError(f"{what} cannot be read as XML: {str(error)[:200]}") from None
    level, count = [root], 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_ELEMENTS:
            raise InputError(f"{what} has more than {MAX_ELEMENTS} elements")
        level = [child for element in level for child in element]
        if not level:
            return root
    raise InputError(f"{what} is nested more than {MAX_DEPTH} elements deep")


def whole(element: Element, attribute: str, default: int | None = None) -> int | None:
    """An attribute as a whole number; `default` where it is missing, empty or something else."""
    text = element.get(attribute, "").strip()
    try:
        number = int(text)
    except ValueError:
        return default
    return number if abs(number) < 2**40 else default
