"""Writes C++ that stores what is set, for every abstract class of NvInferImpl.h, and the names of the layer types.

``setX`` with one parameter and ``getX`` without one share a member ``X_``. What else a class declares does nothing and
returns an empty value; what returns a reference stays abstract. recorder.cpp overrides what has to do more.
"""

import re
import sys
from pathlib import Path

METHOD = re.compile(r"virtual\s+(.+?)\b(\w+)\(([^()]*)\)\s*(const)?\s*(noexcept)?\s*=\s*0;", re.S)


def method(result: str, name: str, parameters: str, trailer: str, body: str) -> str:
    return f"    {result} {name}({parameters}) {trailer} override {{ {body} }}"


def stored(name: str, body: str) -> str:
    methods = [(" ".join(m[0].split()), m[1], " ".join(m[2].split()), f"{m[3]} {m[4]}") for m in METHOD.findall(body)]
    getters = {m[1][3:]: m[0] for m in methods if re.match(r"(get|is)[A-Z]", m[1]) and not m[2]}
    setters = {m[1][3:] for m in methods if m[1].startswith("set") and re.fullmatch(r"[^,&]+|[^,]+const&[^,]*", m[2])}
    pairs = {key: result.replace(" const&", "") for key, result in getters.items() if key in setters}
    lines = [f"struct Stored{name} : nvinfer1::apiv::V{name}", "{", f"    Stored{name}() {{}}"]
    for key, kind in pairs.items():
        lines.append(f"    {'std::string' if kind == 'char const*' else kind} {key}_{{}};")
    for result, label, parameters, trailer in methods:
        key = label[3:]
        if label.startswith("get") and not parameters and key in pairs:
            text = f"return {key}_{'.c_str()' if pairs[key] == 'char const*' else ''};"
        elif label.startswith("set") and key in pairs:
            word = re.search(r"(\w+)$", parameters)
            value = word[1] if word and " " in parameters else ""
            text = f"{key}_ = {value}; changed();" + (" return true;" if result == "bool" else "")
        elif result.endswith("&"):
            continue
        else:
            parameters = re.sub(r"\s*=\s*[^,]+", "", parameters)
            text = "" if result == "void" else "return {};"
        lines.append(method(result, label, parameters, trailer, text))
    return "\n".join([*lines, "};"])


def main() -> None:
    path = Path(sys.argv[1])
    text = re.sub(r"//[^\n]*", "", path.read_text())
    classes = re.findall(
        r"class V(\w*(?:Layer|Tensor|Loop|IfConditional|NetworkDefinition|Builder)) : public VRoot\s*\{(.*?)\n\}",
        text,
        re.S,
    )
    output = ["#pragma once\n#include <NvInfer.h>\n#include <string>\nusing namespace nvinfer1;\nvoid changed();"]
    output += [stored(name, body) for name, body in classes]
    enum = re.search(r"enum class LayerType : int32_t\s*\{(.*?)\};", path.with_name("NvInfer.h").read_text(), re.S)
    names = re.findall(r"^\s*k(\w+)\s*=\s*(\d+)", enum[1], re.M) if enum else []
    cases = " ".join(f'case {number}: return "{name}";' for name, number in names)
    output.append(
        f'inline char const* name_of(LayerType type) {{ switch (int(type)) {{ {cases} }} return "UNKNOWN"; }}'
    )
    sys.stdout.write("\n".join([*output, ""]))


if __name__ == "__main__":
    main()
