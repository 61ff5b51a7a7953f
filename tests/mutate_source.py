"""A source file of fluxlike for `mutate`: its syntax tree, and edits of it by place."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "fluxlike"

Edit = tuple[int, int, str]  # of the source's bytes: from, to, new text


class Source:
    """One file: its tree, and edits by byte offset, because the tree counts columns in bytes."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.bytes = (PACKAGE / file).read_bytes()
        self.tree = ast.parse(self.bytes)
        self._lines = [0, *(i + 1 for i, byte in enumerate(self.bytes) if byte == ord("\n"))]
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    @property
    def module(self) -> str:
        """``sync`` of kernels/sync.py, ``ops.gemm_rs`` of ops/gemm_rs.py."""
        return self.file.removeprefix("kernels/").removesuffix(".py").replace("/", ".")

    def span(self, node: ast.AST) -> tuple[int, int]:
        at = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return self._lines[at[0] - 1] + at[1], self._lines[at[2] - 1] + at[3]

    def segment(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def replace(self, node: ast.AST, text: str) -> Edit:
        return (*self.span(node), text)

    def remove(self, statement: ast.stmt) -> Edit:
        """``pass``, and the lines that the statement had."""
        start, end = self.span(statement)
        return start, end, "pass" + "\n" * self.bytes[start:end].count(b"\n")

    def permute(self, block: list[ast.stmt], order: list[int]) -> tuple[Edit, ...]:
        """The statements of a part of a block in another order; what stands between them stays."""
        return tuple(self.replace(block[i], self.segment(block[j])) for i, j in enumerate(order) if i != j)
