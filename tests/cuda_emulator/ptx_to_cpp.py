"""Translates the PTX that nvcc emitted into C++ that runs on the emulator, statement by statement.

    python tests/cuda_emulator/ptx_to_cpp.py IN.ptx OUT.cpp

An instruction, modifier or directive that is not understood is an error, never skipped; so is everything that
rounds otherwise than IEEE (.ftz, .approx). What the operations mean is in ptx_runtime.h.

Registers become local variables that hold raw bits; each operand is read as the type its instruction names.
`#line` directives carry the kernel's own file and line into debuggers and the emulator's errors.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# PTX type -> C++ type of a value, and of the variable that holds a register of that type.
VALUE_TYPES = {
    "b8": "u8", "u8": "u8", "s8": "s8",
    "b16": "u16", "u16": "u16", "s16": "s16", "f16": "u16", "bf16": "u16",
    "b32": "u32", "u32": "u32", "s32": "s32", "f32": "f32", "f16x2": "u32", "bf16x2": "u32",
    "b64": "u64", "u64": "u64", "s64": "s64", "f64": "f64",
}  # fmt: skip
INTEGER_TYPES = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}
FLOAT_TYPES = {"f32", "f64"}
HALF_TYPES = {"f16", "bf16"}
PACKED_FP8 = {"e4m3x2", "e5m2x2"}

SPECIAL_REGISTERS = {
    f"%{ptx}.{axis}": f"{cuda}.{axis}"
    for ptx, cuda in (
        ("tid", "threadIdx"),
        ("ntid", "blockDim"),
        ("ctaid", "blockIdx"),
        ("nctaid", "gridDim"),
    )
    for axis in "xyz"
}
SPECIAL_REGISTERS |= {
    "%laneid": "cuda_emulator::lane_index()",
    "%lanemask_eq": "(1u << cuda_emulator::lane_index())",
    "%lanemask_lt": "((1u << cuda_emulator::lane_index()) - 1)",
    "%lanemask_le": "((2u << cuda_emulator::lane_index()) - 1)",
    "%lanemask_gt": "~((2u << cuda_emulator::lane_index()) - 1)",
    "%lanemask_ge": "~((1u << cuda_emulator::lane_index()) - 1)",
}

# Directives that change nothing here.
IGNORED_DIRECTIVES = re.compile(
    r"\.(version|target|address_size|file|pragma|minnctapersm|reqntid|maxnreg|alias|noreturn)\b"
)


class TranslationError(Exception):
    pass


def bits_of(ptx_type: str) -> int:
    if ptx_type in ("f16x2", "bf16x2"):
        return 32
    return int(re.search(r"\d+", ptx_type)[0])


def variable_type(ptx_type: str) -> str:
    """The C++ type of a variable that holds raw bits of a PTX type."""
    return "bool" if ptx_type == "pred" else f"u{max(bits_of(ptx_type), 16)}"


def variable_name(register: str) -> str:
    return "r_" + re.sub(r"\W", "_", register.lstrip("%"))


@dataclass
class Instruction:
    """`opcode.modifier.modifier.type operand, operand`; type is the last part, if it is one."""

    text: str
    opcode: str
    modifiers: list[str]
    type: str
    operands: list[str]


@dataclass
class Entry:
    """One kernel while it is being translated."""

    name: str
    parameters: dict[str, int] = field(default_factory=dict)  # name -> offset in the parameter buffer
    registers: dict[str, str] = field(default_factory=dict)  # name -> PTX type
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> alignment, bytes
    shared_used: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    block_limit: int = 0  # threads, 0: none given


Handler = Callable[["Translator", Instruction], str]
HANDLERS: dict[str, tuple[Handler, set[str]]] = {}


def instruction(*opcodes: str, modifiers: str = "") -> Callable[[Handler], Handler]:
    """Registers how opcodes are translated; `modifiers` are those that may stand between opcode and type."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[opcode] = (handler, set(modifiers.split()))
        return handler

    return register


def split_operands(text: str) -> list[str]:
    """Splits at commas outside brackets and braces."""
    operands, depth, current = [], 0, ""
    for character in text:
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        operands.append(current.strip())
    return operands


class Translator:
    def __init__(self) -> None:
        self.entry = Entry("")
        self.module_shared: dict[str, tuple[int, int]] = {}
        self.module_constants: set[str] = set()
        self.files: dict[str, str] = {}
        self.line = 0
        self.output: list[str] = []

    def error(self, message: str) -> TranslationError:
        return TranslationError(f"PTX line {self.line}: {message}")

    # ---- Operands

    def read(self, operand: str, ptx_type: str) -> str:
        """The C++ expression for an operand read as a type."""
        operand = operand.strip()
        if ptx_type == "pred":
            if operand in ("0", "1", "-1"):
                return "false" if operand == "0" else "true"
            negated = operand.startswith("!")
            return ("!" if negated else "") + self.register(operand.lstrip("!"))
        if ptx_type not in VALUE_TYPES:
            raise self.error(f"operand type {ptx_type}")
        value_type = VALUE_TYPES[ptx_type]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return f"ptx::as<{value_type}>(0x{operand[2:]}u)"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return f"ptx::as<{value_type}>(u64{{0x{operand[2:]}ull}})"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            if ptx_type in FLOAT_TYPES:
                raise self.error(f"integer {operand} where a float is read")
            return f"{value_type}({number}{'ll' if number < 2**63 else 'ull'})"
        if operand in SPECIAL_REGISTERS:
            return f"{value_type}({SPECIAL_REGISTERS[operand]})"
        if operand in self.entry.shared:
            self.entry.shared_used.add(operand)
            return f"{value_type}(shared_{variable_name(operand)})"
        if operand in self.entry.local or operand in self.module_constants:
            return f"{value_type}(ptx::address({variable_name(operand)}))"
        if operand in self.entry.parameters:
            offset = self.entry.parameters[operand]
            return f"{value_type}(ptx::address(parameters + {offset}))"
        variable = self.register(operand)
        held = variable_type(self.entry.registers[operand])
        if value_type in ("f32", "f64"):
            if f"u{value_type[1:]}" != held:
                raise self.error(f"register {operand} is read as {ptx_type}")
            return f"ptx::as<{value_type}>({variable})"
        return variable if value_type == held else f"{value_type}({variable})"

    def register(self, name: str) -> str:
        if name not in self.entry.registers:
            raise self.error(f"unknown operand {name}")
        return variable_name(name)

    def write(self, register: str, expression: str) -> str:
        """The statement that stores an expression's value in a register."""
        if register == "_":
            return f"static_cast<void>({expression});"
        name = self.register(register)
        return f"ptx::assign({name}, {expression});"

    def address(self, operand: str, space: str) -> str:
        """The u64 expression for `[base+offset]` in a state space; generic addresses are host pointers."""
        found = re.fullmatch(r"\[\s*([^\]+]+?)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if found is None:
            raise self.error(f"address {operand}")
        base, offset = found[1], int(found[2] or "0", 0)
        if space == "shared":
            return f"ptx::shared_address({self.read(base, 'u32')} + ({offset}))"
        return f"({self.read(base, 'u64')} + u64({offset}ll))"

    def value(self, i: Instruction, index: int) -> str:
        """Operand `index` read as the instruction's own type."""
        return self.read(i.operands[index], i.type)

    def cpp_type(self, ptx_type: str) -> str:
        if ptx_type not in VALUE_TYPES:
            raise self.error(f"type {ptx_type}")
        return VALUE_TYPES[ptx_type]

    # ---- Instructions

    def translate_instruction(self, text: str) -> str:
        guard = ""
        guarded = re.match(r"@(!?)(%?[\w$]+)\s+(.*)", text, re.DOTALL)
        if guarded is not None:
            guard = f"if ({guarded[1]}{self.register(guarded[2])}) "
            text = guarded[3]
        mnemonic, _, rest = text.replace("\t", " ").partition(" ")
        # `ld.global.L1::no_allocate` and the like are one modifier each.
        opcode, *modifiers = mnemonic.split(".")
        ptx_type = ""
        if modifiers and (modifiers[-1] in VALUE_TYPES or modifiers[-1] in ("pred", *PACKED_FP8)):
            ptx_type = modifiers.pop()
        parsed = Instruction(text, opcode, modifiers, ptx_type, split_operands(rest))
        if opcode not in HANDLERS:
            raise self.error(f"unknown instruction: {text}")
        handler, allowed = HANDLERS[opcode]
        for modifier in modifiers:
            if modifier not in allowed:
                raise self.error(f".{modifier} is not supported: {text}")
        try:
            statement = handler(self, parsed)
        except (IndexError, KeyError) as problem:
            raise self.error(f"cannot translate: {text} ({problem!r})") from problem
        return f"{guard}{{ {statement} }}"

    # ---- Module

    def translate(self, text: str) -> str:
        self.output = ['#include "ptx_runtime.h"', "namespace {"]
        for found in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE):
            self.files[found[1]] = found[2]
        code = re.split(r"\n\s*\.section", text)[0]  # debug sections come last
        statements = self.statements(code)
        depth = 0
        for statement in statements:
            if statement == "{":
                depth += 1
                if depth == 1:
                    continue
                self.entry.lines.append("{")
            elif statement == "}":
                depth -= 1
                if depth == 0:
                    self.finish_entry()
                    continue
                self.entry.lines.append("}")
            elif depth == 0:
                self.module_statement(statement)
            else:
                self.entry_statement(statement)
        if depth != 0:
            raise self.error("unbalanced braces")
        self.output.append("}  // namespace")
        return "\n".join(self.output) + "\n"

    def statements(self, code: str):
        """Yields statements without their semicolon, labels with their colon, directives, and lone braces."""
        pending = ""
        for self.line, raw in enumerate(code.split("\n"), 1):
            line = re.sub(r"//.*", "", raw).strip()
            if not line:
                continue
            if not pending and (IGNORED_DIRECTIVES.match(line) or line.startswith((".loc\t", ".loc ", ".maxntid"))):
                yield line
                continue
            pending = f"{pending} {line}".strip()
            while pending:
                if re.match(r"[$\w]+:(\s|$)", pending):
                    label, _, pending = pending.partition(":")
                    yield f"{label}:"
                elif pending[0] == "}" or (pending[0] == "{" and not re.match(r"\{[^;}]*\}\s*,", pending)):
                    yield pending[0]
                    pending = pending[1:]
                elif ".entry" in pending or ".func" in pending:
                    # The header ends where its parameter list closes: the body, or directives, follow.
                    if ")" not in pending:
                        break
                    header, _, pending = pending.partition(")")
                    yield f"{header})"
                elif ";" in pending:
                    statement, _, pending = pending.partition(";")
                    yield statement.strip()
                else:
                    break
                pending = pending.strip()
        if pending:
            raise self.error(f"unfinished statement: {pending}")

    def module_statement(self, statement: str) -> None:
        if IGNORED_DIRECTIVES.match(statement):
            return
        if statement.startswith(".maxntid"):
            limit = 1
            for number in re.findall(r"\d+", statement):
                limit *= int(number)
            self.entry.block_limit = limit
            return
        shared = self.shared_declaration(statement)
        if shared is not None:
            self.module_shared |= shared
            return
        if ".entry" in statement:
            self.start_entry(statement)
            return
        constant = re.fullmatch(
            r"(?:\.(?:visible|weak|extern) )*\.(?:const|global) \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?"
            r"(?:\s*=\s*(.*))?",
            statement,
        )
        if constant is None:
            raise self.error(f"unknown module-level statement: {statement}")
        alignment, ptx_type, name, count, values = constant.groups()
        initial = values if values is not None and values.startswith("{") else f"{{{values or ''}}}"
        if not re.fullmatch(r"\{[-\w\s,]*\}", initial) or ptx_type in FLOAT_TYPES:
            raise self.error(f"initial value of {name}")
        self.module_constants.add(name)
        element = variable_type(ptx_type) if bits_of(ptx_type) > 8 else "u8"
        self.output.append(f"alignas({alignment}) {element} {variable_name(name)}[{count or 1}] = {initial};")

    def shared_declaration(self, statement: str) -> dict[str, tuple[int, int]] | None:
        found = re.fullmatch(
            r"(?:\.(?:extern|weak|visible) )*\.shared \.align (\d+) \.(\w+)\s+([\w$]+)(\[(\d*)\])?", statement
        )
        if found is None:
            return None
        # No size: dynamic shared memory.
        count = int(found[5] or 0) if found[4] else 1
        return {found[3]: (int(found[1]), count * bits_of(found[2]) // 8)}

    def start_entry(self, header: str) -> None:
        name = re.search(r"\.entry\s+([\w$]+)", header)[1]
        self.entry = Entry(name, shared=dict(self.module_shared))
        offset = 0
        for parameter in split_operands(re.search(r"\((.*)\)", header, re.DOTALL)[1]):
            found = re.fullmatch(
                r"\.param (?:\.align (\d+) )?\.(\w+)"
                r"(?: \.ptr(?: \.(?:global|shared|const|local))? \.align \d+)? ([\w$]+)(?:\[(\d+)\])?",
                parameter,
            )
            if found is None:
                raise self.error(f"parameter {parameter}")
            element = bits_of(found[2]) // 8
            alignment = int(found[1] or element)
            offset = (offset + alignment - 1) // alignment * alignment
            self.entry.parameters[found[3]] = offset
            offset += element * int(found[4] or 1)

    def finish_entry(self) -> None:
        entry = self.entry
        self.output.append(f"void entry_{entry.name}(const unsigned char* parameters) {{")
        self.output.append("static_cast<void>(parameters);")
        if entry.block_limit:
            self.output.append(f"ptx::check_block({entry.block_limit});")
        for name in sorted(entry.shared_used):
            alignment, size = entry.shared[name]
            variable = variable_name(name)
            where = "cuda_emulator::dynamic_shared()"
            if size != 0:
                self.output.append(f"static char key_{variable};")
                where = f"cuda_emulator::static_shared(&key_{variable}, {size}, {alignment})"
            self.output.append(f"const u32 shared_{variable} = ptx::shared_offset({where});")
        self.output += entry.lines
        self.output.append("}")
        self.output.append(f'const ptx::Registration registration_{entry.name}("{entry.name}", entry_{entry.name});')
        self.entry = Entry("")

    def entry_statement(self, statement: str) -> None:
        entry = self.entry
        if statement.endswith(":"):
            entry.lines.append(f"{self.label(statement[:-1])}:;")
        elif re.match(r"\.loc\s", statement):
            found = re.match(r"\.loc\s+(\d+)\s+(\d+)", statement)
            if found[1] in self.files and int(found[2]):
                entry.lines.append(f'#line {found[2]} "{self.files[found[1]]}"')
        elif statement.startswith(".reg"):
            self.declare_registers(statement)
        elif statement.startswith(".local"):
            found = re.fullmatch(r"\.local \.align (\d+) \.b8\s+([\w$]+)\[(\d+)\]", statement)
            if found is None:
                raise self.error(statement)
            entry.local.add(found[2])
            entry.lines.append(f"alignas({found[1]}) u8 {variable_name(found[2])}[{found[3]}];")
        elif (shared := self.shared_declaration(statement)) is not None:
            entry.shared |= shared
        elif IGNORED_DIRECTIVES.match(statement):
            pass
        elif statement:
            entry.lines.append(self.translate_instruction(statement))

    def declare_registers(self, statement: str) -> None:
        found = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement)
        if found is None or (found[1] not in VALUE_TYPES and found[1] != "pred"):
            raise self.error(statement)
        names = []
        for declared in split_operands(found[2]):
            family = re.fullmatch(r"(%?[\w$]+)<(\d+)>", declared)
            names += [f"{family[1]}{i}" for i in range(int(family[2]))] if family is not None else [declared]
        for name in names:
            self.entry.registers[name] = found[1]
        declarations = ", ".join(variable_name(name) for name in names)
        self.entry.lines.append(f"{variable_type(found[1])} {declarations};")

    def label(self, name: str) -> str:
        return "label_" + re.sub(r"\W", "_", name)


# ---- Moving values


@instruction("mov")
def mov(t: Translator, i: Instruction) -> str:
    target, source = i.operands
    if target.startswith("{"):  # take apart
        parts = split_operands(target.strip("{} "))
        bits = bits_of(i.type) // len(parts)
        statements = [f"const {variable_type(i.type)} whole = {t.read(source, i.type)};"]
        for index, part in enumerate(parts):
            if part != "_":
                statements.append(t.write(part, f"static_cast<u{bits}>(whole >> {index * bits})"))
        return " ".join(statements)
    if source.startswith("{"):  # put together
        parts = split_operands(source.strip("{} "))
        bits = bits_of(i.type) // len(parts)
        whole = variable_type(i.type)
        terms = [
            f"static_cast<{whole}>({t.read(part, f'b{bits}')}) << {index * bits}" for index, part in enumerate(parts)
        ]
        return t.write(target, f"static_cast<{whole}>({' | '.join(terms)})")
    return t.write(target, t.read(source, i.type))


@instruction("cvta", modifiers="to global shared local const param")
def cvta(t: Translator, i: Instruction) -> str:
    if i.type != "u64":
        raise t.error(i.text)
    source = t.read(i.operands[1], "u64")
    if "shared" in i.modifiers:
        base = "ptx::address(cuda_emulator::shared_memory_base())"
        return t.write(i.operands[0], f"{source} {'-' if 'to' in i.modifiers else '+'} {base}")
    return t.write(i.operands[0], source)


# Cache hints change nothing; .relaxed and .volatile are what every access here is.
ACCESS = (
    "param global shared local const nc ca cg cs cv lu wb wt volatile relaxed weak gpu cta sys v2 v4 v8 "
    "L1::no_allocate L1::evict_first L1::evict_last L1::evict_normal L1::evict_unchanged "
    "L2::64B L2::128B L2::256B"
)


def space_and_count(i: Instruction) -> tuple[str, int]:
    space = next((m for m in i.modifiers if m in ("param", "global", "shared", "local", "const")), "generic")
    count = next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)
    return space, count


@instruction("ld", "ldu", modifiers=ACCESS)
def load(t: Translator, i: Instruction) -> str:
    space, count = space_and_count(i)
    targets = split_operands(i.operands[0].strip("{} ")) if count > 1 else [i.operands[0]]
    if len(targets) != count:
        raise t.error(i.text)
    loaded = f"const auto loaded = ptx::load<{t.cpp_type(i.type)}, {count}>({t.address(i.operands[1], space)});"
    stores = [t.write(name, f"loaded.v[{index}]") for index, name in enumerate(targets) if name != "_"]
    return " ".join([loaded, *stores])


@instruction("st", modifiers=ACCESS)
def store(t: Translator, i: Instruction) -> str:
    space, count = space_and_count(i)
    sources = split_operands(i.operands[1].strip("{} ")) if count > 1 else [i.operands[1]]
    if len(sources) != count:
        raise t.error(i.text)
    values = ", ".join(t.read(source, i.type) for source in sources)
    return f"ptx::store<{t.cpp_type(i.type)}, {count}>({t.address(i.operands[0], space)}, {{{{{values}}}}});"


@instruction("prefetch", modifiers="global L1 L2")
def prefetch(t: Translator, i: Instruction) -> str:
    return ";"


@instruction("selp")
def selp(t: Translator, i: Instruction) -> str:
    chosen = f"{t.read(i.operands[3], 'pred')} ? {t.value(i, 1)} : {t.value(i, 2)}"
    return t.write(i.operands[0], chosen)


# ---- Arithmetic


def check_rounding(t: Translator, i: Instruction, *, needed: bool) -> None:
    """Floats must be rounded to nearest even, and have to say so where the default is something else."""
    if i.type in INTEGER_TYPES and "rn" in i.modifiers:
        raise t.error(i.text)
    if needed and i.type in FLOAT_TYPES and "rn" not in i.modifiers:
        raise t.error(f"not rounded to nearest: {i.text}")
    if i.type not in INTEGER_TYPES | FLOAT_TYPES:
        raise t.error(f"type .{i.type}: {i.text}")


@instruction("add", "sub", modifiers="rn")
def add_or_sub(t: Translator, i: Instruction) -> str:
    check_rounding(t, i, needed=False)
    result = f"ptx::{i.opcode}<{t.cpp_type(i.type)}>({t.value(i, 1)}, {t.value(i, 2)})"
    return t.write(i.operands[0], result)


def wide_type(t: Translator, i: Instruction) -> str:
    if i.type not in ("u16", "s16", "u32", "s32"):
        raise t.error(i.text)
    return f"{i.type[0]}{2 * bits_of(i.type)}"


def product(t: Translator, i: Instruction) -> tuple[str, str]:
    """The product of operands 1 and 2, and its PTX type."""
    check_rounding(t, i, needed=False)
    first, second = t.value(i, 1), t.value(i, 2)
    if "wide" in i.modifiers:
        wide = wide_type(t, i)
        cpp = t.cpp_type(wide)
        return f"static_cast<{cpp}>(static_cast<{cpp}>({first}) * static_cast<{cpp}>({second}))", wide
    if "hi" in i.modifiers:
        return f"ptx::mul_hi<{t.cpp_type(i.type)}>({first}, {second})", i.type
    if i.type in INTEGER_TYPES and "lo" not in i.modifiers:
        raise t.error(i.text)
    return f"ptx::mul<{t.cpp_type(i.type)}>({first}, {second})", i.type


@instruction("mul", modifiers="rn lo hi wide")
def mul(t: Translator, i: Instruction) -> str:
    return t.write(i.operands[0], product(t, i)[0])


@instruction("mad", modifiers="lo hi wide")
def mad(t: Translator, i: Instruction) -> str:
    if i.type in FLOAT_TYPES:
        raise t.error(i.text)
    expression, ptx_type = product(t, i)
    cpp = t.cpp_type(ptx_type)
    return t.write(i.operands[0], f"ptx::add<{cpp}>({expression}, {t.read(i.operands[3], ptx_type)})")


@instruction("fma", modifiers="rn")
def fma(t: Translator, i: Instruction) -> str:
    check_rounding(t, i, needed=True)
    return t.write(i.operands[0], f"ptx::fma({t.value(i, 1)}, {t.value(i, 2)}, {t.value(i, 3)})")


@instruction("div", modifiers="rn")
def div(t: Translator, i: Instruction) -> str:
    check_rounding(t, i, needed=True)
    return t.write(i.operands[0], f"ptx::div<{t.cpp_type(i.type)}>({t.value(i, 1)}, {t.value(i, 2)})")


@instruction("rem")
def rem(t: Translator, i: Instruction) -> str:
    return t.write(i.operands[0], f"ptx::rem<{t.cpp_type(i.type)}>({t.value(i, 1)}, {t.value(i, 2)})")


@instruction("rcp", modifiers="rn")
def rcp(t: Translator, i: Instruction) -> str:
    check_rounding(t, i, needed=True)
    return t.write(i.operands[0], f"ptx::div<{t.cpp_type(i.type)}>(1, {t.value(i, 1)})")


@instruction("sqrt", modifiers="rn")
def sqrt(t: Translator, i: Instruction) -> str:
    check_rounding(t, i, needed=True)
    return t.write(i.operands[0], f"ptx::sqrt({t.value(i, 1)})")


@instruction("abs", "neg")
def sign(t: Translator, i: Instruction) -> str:
    if i.type in HALF_TYPES:
        return t.write(i.operands[0], f"ptx::half_{i.opcode}({t.value(i, 1)})")
    return t.write(i.operands[0], f"ptx::{i.opcode}<{t.cpp_type(i.type)}>({t.value(i, 1)})")


@instruction("copysign")
def copysign(t: Translator, i: Instruction) -> str:
    return t.write(i.operands[0], f"ptx::copysign({t.value(i, 2)}, {t.value(i, 1)})")


@instruction("min", "max", modifiers="NaN")
def min_or_max(t: Translator, i: Instruction) -> str:
    if i.type not in INTEGER_TYPES | FLOAT_TYPES or len(i.operands) != 3:
        raise t.error(i.text)
    suffix = "_nan" if "NaN" in i.modifiers else ""
    result = f"ptx::{i.opcode}{suffix}<{t.cpp_type(i.type)}>({t.value(i, 1)}, {t.value(i, 2)})"
    return t.write(i.operands[0], result)


# ---- Bits


@instruction("and", "or", "xor")
def bitwise(t: Translator, i: Instruction) -> str:
    if i.type == "pred":
        operator = {"and": "&&", "or": "||", "xor": "!="}[i.opcode]
        return t.write(i.operands[0], f"({t.value(i, 1)}) {operator} ({t.value(i, 2)})")
    operator = {"and": "&", "or": "|", "xor": "^"}[i.opcode]
    return t.write(i.operands[0], f"static_cast<{t.cpp_type(i.type)}>({t.value(i, 1)} {operator} {t.value(i, 2)})")


@instruction("not")
def bitwise_not(t: Translator, i: Instruction) -> str:
    if i.type == "pred":
        return t.write(i.operands[0], f"!({t.value(i, 1)})")
    return t.write(i.operands[0], f"static_cast<{t.cpp_type(i.type)}>(~{t.value(i, 1)})")


@instruction("shl", "shr")
def shift(t: Translator, i: Instruction) -> str:
    amount = t.read(i.operands[2], "u32")
    return t.write(i.operands[0], f"ptx::{i.opcode}<{t.cpp_type(i.type)}>({t.value(i, 1)}, {amount})")


@instruction("shf", modifiers="l r wrap clamp")
def funnel_shift(t: Translator, i: Instruction) -> str:
    direction, mode = i.modifiers
    name = f"ptx::funnel_shift_{'left' if direction == 'l' else 'right'}_{mode}"
    return t.write(i.operands[0], f"{name}({t.value(i, 1)}, {t.value(i, 2)}, {t.read(i.operands[3], 'u32')})")


@instruction("prmt")
def prmt(t: Translator, i: Instruction) -> str:
    return t.write(i.operands[0], f"__byte_perm({t.value(i, 1)}, {t.value(i, 2)}, {t.value(i, 3)})")


@instruction("lop3")
def lop3(t: Translator, i: Instruction) -> str:
    table = int(i.operands[4], 0)
    return t.write(i.operands[0], f"ptx::lop3({t.value(i, 1)}, {t.value(i, 2)}, {t.value(i, 3)}, {table})")


@instruction("bfe")
def bfe(t: Translator, i: Instruction) -> str:
    position, length = t.read(i.operands[2], "u32"), t.read(i.operands[3], "u32")
    return t.write(i.operands[0], f"ptx::bfe<{t.cpp_type(i.type)}>({t.value(i, 1)}, {position}, {length})")


@instruction("bfi")
def bfi(t: Translator, i: Instruction) -> str:
    position, length = t.read(i.operands[3], "u32"), t.read(i.operands[4], "u32")
    result = f"ptx::bfi<{t.cpp_type(i.type)}>({t.value(i, 1)}, {t.value(i, 2)}, {position}, {length})"
    return t.write(i.operands[0], result)


@instruction("popc", "clz")
def count_bits(t: Translator, i: Instruction) -> str:
    return t.write(i.operands[0], f"ptx::{i.opcode}({t.value(i, 1)})")


@instruction("bfind", modifiers="shiftamt")
def bfind(t: Translator, i: Instruction) -> str:
    if i.type not in ("u32", "u64"):
        raise t.error(i.text)
    found = f"ptx::bfind({t.value(i, 1)}, {'true' if 'shiftamt' in i.modifiers else 'false'})"
    return t.write(i.operands[0], found)


@instruction("brev")
def brev(t: Translator, i: Instruction) -> str:
    if i.type != "b32":
        raise t.error(i.text)
    return t.write(i.operands[0], f"__brev({t.value(i, 1)})")


# ---- Predicates

COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip


def comparison(t: Translator, i: Instruction, kind: str) -> str:
    first, second = t.value(i, 1), t.value(i, 2)
    is_float = i.type in FLOAT_TYPES
    if i.type in HALF_TYPES:
        raise t.error(i.text)
    if is_float and kind == "ne":  # false if one is NaN, unlike C++'s !=
        return f"({first} < {second} || {first} > {second})"
    if kind in COMPARISONS:
        return f"({first} {COMPARISONS[kind]} {second})"
    if is_float and kind == "num":
        return f"(!std::isnan({first}) && !std::isnan({second}))"
    if is_float and kind == "nan":
        return f"(std::isnan({first}) || std::isnan({second}))"
    if is_float and kind.endswith("u") and kind[:-1] in COMPARISONS:  # true if one is NaN
        operator = COMPARISONS[kind[:-1]]
        return f"(std::isnan({first}) || std::isnan({second}) || {first} {operator} {second})"
    raise t.error(i.text)


@instruction(
    "setp",
    modifiers="eq ne lt le gt ge lo ls hi hs num nan equ neu ltu leu gtu geu and or xor",
)
def setp(t: Translator, i: Instruction) -> str:
    result = comparison(t, i, i.modifiers[0])
    if len(i.modifiers) == 2:
        operator = {"and": "&&", "or": "||", "xor": "!="}[i.modifiers[1]]
        result = f"{result} {operator} ({t.read(i.operands[3], 'pred')})"
    targets = i.operands[0].split("|")
    statements = [f"const bool result = {result};", t.write(targets[0], "result")]
    if len(targets) == 2:
        # The second target is the comparison's opposite, combined the same way.
        if len(i.modifiers) == 2:
            raise t.error(i.text)
        statements.append(t.write(targets[1], "!result"))
    return " ".join(statements)


@instruction("testp", modifiers="finite infinite number notanumber normal subnormal")
def testp(t: Translator, i: Instruction) -> str:
    test = {
        "finite": "std::isfinite(x)",
        "infinite": "std::isinf(x)",
        "number": "!std::isnan(x)",
        "notanumber": "std::isnan(x)",
        "normal": "std::fpclassify(x) == FP_NORMAL || x == 0",
        "subnormal": "std::fpclassify(x) == FP_SUBNORMAL",
    }[i.modifiers[0]]
    return f"const {t.cpp_type(i.type)} x = {t.value(i, 1)}; {t.write(i.operands[0], test)}"


# ---- Conversions


def packed_conversion(t: Translator, i: Instruction, target: str, modifiers: set[str]) -> str | None:
    """Conversions of and to two values at a time: cvt.TARGET.SOURCE a, high, low."""
    if target in PACKED_FP8 and i.type == "f32":
        if modifiers != {"rn", "satfinite"}:
            raise t.error(i.text)
        kind = f"__NV_{target[:4].upper()}"
        high, low = t.value(i, 1), t.value(i, 2)
        return t.write(i.operands[0], f"ptx::floats_to_fp8({high}, {low}, {kind})")
    if target == "f16x2" and i.type in PACKED_FP8:
        if modifiers != {"rn"}:
            raise t.error(i.text)
        kind = f"__NV_{i.type[:4].upper()}"
        return t.write(i.operands[0], f"ptx::fp8_to_halves({t.read(i.operands[1], 'b16')}, {kind})")
    if target in PACKED_FP8 and i.type == "f16x2":
        if modifiers != {"rn", "satfinite"}:
            raise t.error(i.text)
        kind = f"__NV_{target[:4].upper()}"
        return t.write(i.operands[0], f"ptx::halves_to_fp8({t.value(i, 1)}, {kind})")
    if target in ("f16x2", "bf16x2") and i.type == "f32":
        if modifiers != {"rn"}:
            raise t.error(i.text)
        narrow = "to_half" if target == "f16x2" else "to_bfloat16"
        high, low = f"ptx::{narrow}({t.value(i, 1)})", f"ptx::{narrow}({t.value(i, 2)})"
        return t.write(i.operands[0], f"static_cast<u32>({high}) << 16 | {low}")
    return None


@instruction("cvt", modifiers=" ".join(["rn rz rm rp rni rzi rmi rpi sat satfinite", *VALUE_TYPES, *PACKED_FP8]))
def cvt(t: Translator, i: Instruction) -> str:
    target = next(m for m in reversed(i.modifiers) if m in VALUE_TYPES or m in PACKED_FP8)
    modifiers = set(i.modifiers) - {target}
    packed = packed_conversion(t, i, target, modifiers)
    if packed is not None:
        return packed
    if "satfinite" in modifiers:
        raise t.error(i.text)
    rounding = modifiers - {"sat"}
    source_type, value = i.type, t.value(i, 1)
    if source_type in HALF_TYPES:  # widening is exact, so it can come first
        value = f"ptx::from_{'half' if source_type == 'f16' else 'bfloat16'}({value})"
        source_type = "f32"
    if target in HALF_TYPES:
        if source_type != "f32" or rounding - {"rn"} or "sat" in modifiers:
            raise t.error(i.text)
        narrow = "to_half" if target == "f16" else "to_bfloat16"
        return t.write(i.operands[0], f"ptx::{narrow}({value})")
    cpp = t.cpp_type(target)
    if source_type in FLOAT_TYPES and target in INTEGER_TYPES:
        (how,) = rounding
        rounded = f"ptx::round_{how}({value})"
        return t.write(i.operands[0], f"cuda_emulator::saturating_cast<{cpp}>({rounded})")
    if source_type in FLOAT_TYPES and target == source_type:
        if rounding:
            (how,) = rounding
            value = f"ptx::round_{how}({value})"
        if "sat" in modifiers:
            value = f"ptx::saturate({value})"
        return t.write(i.operands[0], f"ptx::canonical({value})")
    if "sat" in modifiers:
        if target in FLOAT_TYPES:
            raise t.error(i.text)
        return t.write(i.operands[0], f"ptx::saturate_integer<{cpp}>({value})")
    if rounding - {"rn"}:
        raise t.error(f"not rounded to nearest: {i.text}")
    if target in FLOAT_TYPES:
        return t.write(i.operands[0], f"ptx::canonical(static_cast<{cpp}>({value}))")
    return t.write(i.operands[0], f"static_cast<{cpp}>({value})")


# ---- Atomics, barriers, collectives

UPDATES = {
    "add": "ptx::add<{T}>(old, operand)",
    "exch": "operand",
    "min": "ptx::min<{T}>(old, operand)",
    "max": "ptx::max<{T}>(old, operand)",
    "inc": "old >= operand ? 0 : old + 1",
    "dec": "old == 0 || old > operand ? operand : old - 1",
    "and": "old & operand",
    "or": "old | operand",
    "xor": "old ^ operand",
    "cas": "old == operand ? replacement : old",
}


@instruction("atom", "red", modifiers="global shared relaxed gpu cta sys " + " ".join(UPDATES))
def atomic(t: Translator, i: Instruction) -> str:
    operation = next(m for m in i.modifiers if m in UPDATES)
    cpp = t.cpp_type(i.type)
    first = 1 if i.opcode == "atom" else 0
    space = "shared" if "shared" in i.modifiers else "global"
    update = UPDATES[operation].format(T=cpp)
    statements = [f"const {cpp} operand = {t.value(i, first + 1)};"]
    if operation == "cas":
        statements.append(f"const {cpp} replacement = {t.value(i, first + 2)};")
    result = f"ptx::atomic<{cpp}>({t.address(i.operands[first], space)}, [=]({cpp} old) {{ return {update}; }})"
    statements.append(t.write(i.operands[0], result) if i.opcode == "atom" else f"{result};")
    return " ".join(statements)


SITE = '{{"{}", __FILE__, __LINE__}}'


@instruction("bar", "barrier", modifiers="sync red warp cta aligned or and popc")
def barrier(t: Translator, i: Instruction) -> str:
    name = i.text.split()[0]
    site = SITE.format(name)
    kinds = set(i.modifiers) - {"cta", "aligned"}
    if kinds == {"warp", "sync"}:
        meeting = f"cuda_emulator::warp_meet({t.read(i.operands[0], 'u32')}, nullptr, 0, true, {site})"
        return f"cuda_emulator::warp_leave({meeting});"
    if kinds == {"sync"} and i.operands == ["0"]:
        return f"cuda_emulator::block_barrier(0, cuda_emulator::BarrierResult::kNone, {site});"
    votes = {"or": "kOr", "and": "kAnd", "popc": "kCount"}
    vote = next((m for m in kinds if m in votes), None)
    if vote is not None and kinds == {"red", vote} and i.operands[1] == "0" and len(i.operands) == 3:
        result = f"cuda_emulator::BarrierResult::{votes[vote]}"
        predicate = t.read(i.operands[2], "pred")
        votes_cast = f"cuda_emulator::block_barrier({predicate}, {result}, {site})"
        return t.write(i.operands[0], f"{votes_cast} != 0" if i.type == "pred" else f"static_cast<u32>({votes_cast})")
    raise t.error(i.text)


@instruction("membar", "fence", modifiers="gl cta sys gpu acq_rel sc")
def fence(t: Translator, i: Instruction) -> str:
    return "cuda_emulator::fence_block();" if "cta" in i.modifiers else "cuda_emulator::fence_device();"


@instruction("shfl", modifiers="sync up down bfly idx")
def shfl(t: Translator, i: Instruction) -> str:
    mode = f"ptx::Shuffle::k{i.modifiers[1].capitalize()}"
    targets = i.operands[0].split("|")
    value, lane, limits, mask = (t.read(operand, "b32") for operand in i.operands[1:5])
    statements = ["bool in_range;"]
    call = f"ptx::shuffle({mode}, {value}, {lane}, {limits}, {mask}, &in_range, {SITE.format('shfl.sync')})"
    statements.append(t.write(targets[0], call))
    if len(targets) == 2 and targets[1] != "_":
        statements.append(t.write(targets[1], "in_range"))
    return " ".join(statements)


@instruction("vote", modifiers="sync ballot any all")
def vote(t: Translator, i: Instruction) -> str:
    kind = i.modifiers[1]
    predicate, mask = t.read(i.operands[1], "pred"), t.read(i.operands[2], "u32")
    return t.write(i.operands[0], f"ptx::vote_{kind}({mask}, {predicate}, {SITE.format('vote.sync')})")


@instruction("redux", modifiers="sync add min max and or xor")
def redux(t: Translator, i: Instruction) -> str:
    cpp = t.cpp_type(i.type)
    combine = UPDATES[i.modifiers[1]].format(T=cpp).replace("operand", "other")
    value, mask = t.value(i, 1), t.read(i.operands[2], "u32")
    function = f"[]({cpp} old, {cpp} other) -> {cpp} {{ return {combine}; }}"
    return t.write(
        i.operands[0],
        f"cuda_emulator::warp_reduce<{cpp}>({mask}, {value}, {function}, {SITE.format('redux.sync')})",
    )


# ---- Control flow


@instruction("bra", modifiers="uni")
def bra(t: Translator, i: Instruction) -> str:
    return f"goto {t.label(i.operands[0])};"


@instruction("ret", "exit", modifiers="uni")
def ret(t: Translator, i: Instruction) -> str:
    return "return;"


@instruction("trap")
def trap(t: Translator, i: Instruction) -> str:
    return 'cuda_emulator::fail("trap");'


def translate(text: str) -> str:
    """The C++ for a PTX module; raises TranslationError with the PTX line for whatever is not understood."""
    return Translator().translate(text)


def main() -> None:
    source, target = sys.argv[1:]
    try:
        Path(target).write_text(translate(Path(source).read_text()))
    except TranslationError as problem:
        sys.exit(f"{source}: {problem}")


if __name__ == "__main__":
    main()
