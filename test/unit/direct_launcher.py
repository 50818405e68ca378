"""What tests need to run `runtime.direct` without a GPU: kernels through the interpreter, launched again on other memory."""

from topo_opt.runtime import interpreter
from topo_opt.runtime.direct import DirectVariant
from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.kernel_module import load_function
from topo_opt.runtime.steps import plain_tensors


class Interpreted:
    """One kernel of a bundle."""

    def __init__(self, owner, name, kernel):
        self.owner, self.name, self.kernel = owner, name, kernel
        with interpreter.interpreting():
            self.function = load_function(*owner.sources.text(kernel), kernel.function)

    def __call__(self):
        raise AssertionError("a direct variant launches on the memory of the call only")

    def on(self, tensors, stream, *, dependent):
        self.owner.prepared.append((self.name, dependent))
        arguments, tensors = kernel_arguments(self.kernel, list(tensors)), list(tensors)

        def run():
            self.owner.ran.append(self.name)
            interpreter.launch(self.function, self.kernel.grid, arguments, tensors)

        return run, self.owner.lasting


class InterpretedLauncher:
    """`lasting`: launches may be kept; they then keep the tensors too, which tests must bear in mind."""

    def __init__(self, sources, *, lasting=True, allow_ops=frozenset()):
        self.sources, self.lasting, self.allow_ops = sources, lasting, allow_ops
        self.prepared, self.ran = [], []
        self.ranks = None

    def prepare(self, name, kernel, tensors):
        return Interpreted(self, name, kernel)


def direct_of(program, function, **options):
    """The direct form of the only variant of a function of a program on the CPU, its launcher, and a way to call it."""
    launcher = InterpretedLauncher(program.executor.sources, **options)
    (variant,) = program.variants(function)
    direct = DirectVariant(variant, program.plan.kernels, program.memory, launcher)

    def call(*leaves, short=False):
        with plain_tensors(), interpreter.interpreting():
            return (direct.run_accepted if short else direct.run)(leaves, 0)

    return direct, launcher, call
