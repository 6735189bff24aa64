"""Which room of unitsphere imports which, read from the source, and docs/figures/rooms.svg, which shows it.

    python benchmarks/room_graph.py BEFORE --out docs/figures/rooms.svg    (BEFORE: the folder of the older package)

Every kind of import counts: of a module, inside a function, under TYPE_CHECKING, and the name of a module in a text, as
it is given to import_module or stands in a table. Imports nothing of what it reads.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

# From bottom to top. A module may import from its own room and from the rooms before it.
ORDER = (
    *("common", "objectives", "images", "views", "data", "modules", "weights", "optimisation", "config", "methods"),
    *("runs", "features", "training", "evaluation", "analysis", "report", "jobs", "studies", "cli"),
)
HERE = Path(__file__).resolve().parents[1] / "unitsphere"
Graph = dict[str, set[str]]


def read_graph(package: Path) -> Graph:
    """Return which modules of a package each of its modules imports, by dotted names. package: its folder."""
    files = {name_of(package, path): path for path in sorted(package.rglob("*.py"))}
    return {name: imports(name, path, files) - {name} for name, path in files.items()}


def name_of(package: Path, path: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules among `known` that the file of a module names. `import a.b` names a.b and not a."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
            above = home[: len(home) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names.update(f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(":")[0]  # as in "package.module:function"
            names.update([text] if "." in text and text in known else [])
    found = set()
    for name in names:
        while name and name not in known:
            name = name.rpartition(".")[0]  # a function or a class of the module before the dot
        found.add(name)
    return found - {""}


def room_of(module: str) -> str:
    """Return the room of a module: the folder in the package, or "top" for what stands in the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else "top"


def upward(graph: Graph) -> list[str]:
    """Return the imports from a room that stands higher, as "importer -> imported"."""
    height = {room: place for place, room in enumerate((*ORDER, "top"))}
    unknown = {room_of(module) for module in graph} - set(height)
    if unknown:
        raise ValueError(f"no place in ORDER for {', '.join(sorted(unknown))}: give each room one")
    return [
        f"{module} -> {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if height[room_of(other)] > height[room_of(module)]
    ]


def circles(graph: Graph) -> list[set[str]]:
    """Return the sets of nodes in which each node reaches every other, if they have more than one."""
    reach = {node: reached(node, graph) for node in graph}
    found = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return [set(nodes) for nodes in found if len(nodes) > 1]


def reached(start: str, graph: Graph) -> set[str]:
    """Return what is reached from a node in one step or more."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def edges(graph: Graph) -> Counter[tuple[str, str]]:
    """Return how many modules of a room import from which other room."""
    pairs = ((room_of(module), {room_of(other) for other in others}) for module, others in graph.items())
    return Counter((room, other) for room, others in pairs for other in others if other != room)


def best_order(arrows: Counter[tuple[str, str]]) -> list[str]:
    """Return the rooms in the order, from bottom to top, that has the fewest arrows upwards, as far as moves of single
    rooms find it: so the older package is shown as well as it can be."""
    order = sorted({room for pair in arrows for room in pair})

    def cost(rooms: list[str]) -> int:
        place = {room: number for number, room in enumerate(rooms)}
        return sum(place[other] > place[room] for room, other in arrows)

    while True:
        moves = []
        for room in order:
            rest = [other for other in order if other != room]
            moves += [[*rest[:at], room, *rest[at:]] for at in range(len(order))]
        better = min(moves, key=cost)
        if cost(better) >= cost(order):
            return order
        order = better


def draw(panels: list[tuple[str, list[str], Counter[tuple[str, str]]]], out: Path) -> None:
    """Draw one column of rooms a panel: arrows down as thin arcs on the right, arrows up as red ones on the left.

    panels: title, rooms from bottom to top, arrows. An arc is the wider, the more modules have that import.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Arc

    matplotlib.rcParams |= {"svg.hashsalt": "rooms", "svg.fonttype": "none"}  # the same file from the same source
    figure = Figure(figsize=(9.5, 6.2), layout="constrained")
    for axes, (title, rooms, arrows) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        height = {room: place for place, room in enumerate(rooms)}
        up = sum(height[other] > height[room] for room, other in arrows)
        for (room, other), count in sorted(arrows.items()):
            low, high = sorted((height[room], height[other]))
            rises = height[other] > height[room]
            side, turn = (-2.3, (90, 270)) if rises else (2.3, (-90, 90))
            look = {"color": "#d1242f", "linewidth": 1.6} if rises else {"color": "#0969da", "alpha": 0.4}
            look = {"linewidth": 0.5 + 0.13 * count, **look}
            centre, span = (side, (low + high) / 2), high - low
            axes.add_patch(Arc(centre, 0.62 * span, span, theta1=turn[0], theta2=turn[1], **look))
        for room, place in height.items():
            axes.text(
                0, place, "__init__" if room == "top" else room, ha="center", va="center", fontsize=10, color="#1f2328"
            )
        own = {room: {other for home, other in arrows if home == room} for room in rooms}
        caught = sum(map(len, circles(own)))
        words = f"{len(arrows)} arrows, {up or 'none'} upwards; {caught or 'no'} rooms in circles"
        axes.set_title(f"{title}\n{words}", fontsize=11)
        axes.set(xlim=(-9, 9), ylim=(-0.8, len(rooms) - 0.2))
        axes.axis("off")
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="the folder of the older package")
    parser.add_argument("--out", type=Path, required=True, help="where the figure goes; .svg or .png")
    options = parser.parse_args()
    before, after = edges(read_graph(options.before)), edges(read_graph(HERE))
    rooms = {room for pair in after for room in pair}
    order = [room for room in (*ORDER, "top") if room in rooms]
    draw([("before", best_order(before), before), ("after", order, after)], options.out)


if __name__ == "__main__":
    main()
