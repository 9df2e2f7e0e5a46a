"""What can go wrong while a model is compiled."""


class CompileError(Exception):
    """The model can't be compiled. The text is one line for the operator, with the place in the model's code where there is one."""


class NoCompilerError(CompileError):
    """The machine has no compiler, or one that does not work: the model itself may be fine."""
