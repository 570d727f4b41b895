"""Draw the house from its imports: which room of ``engine/`` and ``server/`` builds on which.

python -m tools.draw_house      (writes docs/images/house.svg; part of make written)

A room is a folder, or a module next to the folders. It stands one floor above the highest room that it
imports. Lines go to rooms that it imports, except to those that it reaches through another one.
"""

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "house.svg"
PACKAGE = "truedraft"
FOLDERS = ("engine", "server")

WIDTH, MARGIN = 640, 16
BOX_HEIGHT, FLOOR_HEIGHT, GAP = 26, 58, 12
CHARACTER = 7.2  # the width of a letter in the picture's font
FILLS = {"engine": "#dcebdd", "server": "#dde6f5"}

Room = tuple[str, str]  # a folder, and the room's name in it


class Box(NamedTuple):
    x: float
    y: float
    width: float


def rooms_of(path: Path) -> Room:
    """Returns the room that a file is in."""
    folder, *names = path.relative_to(ROOT).parts
    return folder, names[0].removesuffix(".py")


def imported_by(path: Path) -> set[Room]:
    """Returns the rooms that a file imports, wherever in it the import stands, but for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in {f"{PACKAGE}.{name}" for name in FOLDERS}
        for alias in node.names
    }
    found = set()
    for module in modules:
        root, *names = module.split(".")
        if root == PACKAGE and len(names) > 1 and names[0] in FOLDERS:
            found.add((names[0], names[1]))
    return found


def imports() -> dict[Room, set[Room]]:
    """Returns for each room the others that it imports."""
    graph: dict[Room, set[Room]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "__init__.py" and not path.read_text(encoding="utf-8").strip():
                continue
            room = rooms_of(path)
            graph.setdefault(room, set()).update(imported_by(path) - {room})
    return {room: {other for other in others if other in graph} for room, others in graph.items()}


def floors_of(graph: dict[Room, set[Room]]) -> dict[Room, int]:
    """Returns the floor of each room, within its folder; imports of one folder have no circles."""
    floors: dict[Room, int] = {}

    def floor(room: Room) -> int:
        if room not in floors:
            below = [floor(other) for other in graph[room] if other[0] == room[0]]
            floors[room] = 1 + max(below, default=-1)
        return floors[room]

    for room in graph:
        floor(room)
    return floors


def reached(graph: dict[Room, set[Room]], starts: Iterable[Room]) -> set[Room]:
    """Returns the rooms that these import, and so on, with these."""
    found: set[Room] = set()
    waiting = list(starts)
    while waiting:
        room = waiting.pop()
        if room not in found:
            found.add(room)
            waiting += graph[room]
    return found


def direct(graph: dict[Room, set[Room]]) -> list[tuple[Room, Room]]:
    """Returns the imports that lead nowhere another one leads, too."""
    inside = {room: {other for other in others if other[0] == room[0]} for room, others in graph.items()}
    lines = []
    for room, others in inside.items():
        for other in sorted(others):
            through = reached(inside, others - {other})
            if other not in through:
                lines.append((room, other))
    return sorted(lines)


def placed(floors: dict[Room, int]) -> tuple[dict[Room, Box], float]:
    """Returns each room's box, and the picture's height: the server stands on the engine."""
    boxes: dict[Room, Box] = {}
    y = float(MARGIN + 20)
    for folder in reversed(FOLDERS):
        highest = max(floor for room, floor in floors.items() if room[0] == folder)
        for number in range(highest, -1, -1):
            names = sorted(room for room, floor in floors.items() if room[0] == folder and floor == number)
            widths = [len(name) * CHARACTER + 18 for _, name in names]
            x = (WIDTH - sum(widths) - GAP * (len(widths) - 1)) / 2
            for room, width in zip(names, widths, strict=True):
                boxes[room] = Box(round(x, 1), y, round(width, 1))
                x += width + GAP
            y += FLOOR_HEIGHT
        y += 26
    return boxes, y - FLOOR_HEIGHT + BOX_HEIGHT


def drawn() -> str:
    """Returns the picture as SVG."""
    graph = imports()
    boxes, height = placed(floors_of(graph))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">',
        "<title>The rooms of engine and server; each builds on rooms of lower floors only</title>",
        f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
    ]
    for folder in FOLDERS:
        top = min(box.y for room, box in boxes.items() if room[0] == folder)
        parts.append(f'<text x="{MARGIN}" y="{top - 8:g}" font-size="14" font-weight="bold">{folder}/</text>')
    for room, other in direct(graph):
        start, end = boxes[room], boxes[other]
        x1, x2 = start.x + start.width / 2, end.x + end.width / 2
        y1, y2 = start.y + BOX_HEIGHT, end.y
        middle = (y1 + y2) / 2
        parts.append(
            f'<path d="M{x1:.1f} {y1:g} C{x1:.1f} {middle:g} {x2:.1f} {middle:g} {x2:.1f} {y2:g}" '
            'fill="none" stroke="#8a9299"/>'
        )
    for (folder, name), box in boxes.items():
        parts.append(
            f'<rect x="{box.x}" y="{box.y:g}" width="{box.width}" height="{BOX_HEIGHT}" rx="5" '
            f'fill="{FILLS[folder]}" stroke="#5b6268"/>'
            f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + 17:g}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
    print(f"Written: {PICTURE.relative_to(ROOT)}")
