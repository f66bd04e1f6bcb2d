"""The program that calls an answer's functions, inside the sandbox. Kept as text; never run here.

It reads one request from standard input, loads `solution.py`, evaluates, and writes a mark and the
value's `repr`. Values of types other than Python's own plain ones are refused, so that no method of
the answer's takes part in the comparison, which is made outside.
"""

SOURCE = r"""
import json, os, sys
mark = sys.argv.pop()
request = json.loads(sys.stdin.read())
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = {"__name__": "solution"}
with open("solution.py", encoding="utf-8") as stream:
    source = stream.read()


def __call__(path, arguments):
    target = names
    head, _, method = path.partition(".")
    found = names.get(head)
    if found is None and "Solution" in names:
        found, method = names["Solution"], path
    if method:
        found = getattr(found(), method)
    elif "Solution" in names and not callable(found):
        found = getattr(names["Solution"](), path)
    return found(*arguments)


def plain(value, depth=0):
    kind = type(value)
    if depth > 50:
        raise TypeError("too deep")
    if value is None or kind in (bool, int, float, str, bytes, complex):
        return value
    if kind in (list, tuple, set, frozenset):
        made = [plain(one, depth + 1) for one in value]
        return made if kind is list else tuple(made) if kind is tuple else set(made)
    if kind.__name__ in ("dict", "defaultdict", "Counter", "OrderedDict"):
        return {plain(k, depth + 1): plain(v, depth + 1) for k, v in dict.items(value)}
    if kind.__name__ in ("deque", "range", "map", "filter", "zip", "dict_keys", "dict_values"):
        return [plain(one, depth + 1) for one in value]
    raise TypeError("the value's type is " + kind.__name__)


exec(compile(source, "solution.py", "exec"), names)
names["__call__"] = __call__
exec(compile(request["setup"], "setup", "exec"), names)
text = repr(plain(eval(request["expression"], names)))
out.write("\n" + mark + text + "\n")
out.flush()
os._exit(0)
"""
