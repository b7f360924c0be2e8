"""What is wrong with a template of strangers, or with one row of it: the errors of `jinja_sandbox`.

Which of them a row gets, `jinja_process` decides.
"""


class TemplateError(ValueError):
    """A template that cannot be compiled or rendered; says why, without the template's name."""


class TemplateSyntaxError(TemplateError):
    """It is no Jinja."""


class UndefinedVariable(TemplateError):
    """A strict template reads what is not there."""


class TemplateRaised(TemplateError):
    """It called `raise_exception`; the message is its own."""


class TemplateTooCostly(TemplateError):
    """It takes more time or memory than a template may."""


class RendererEnded(TemplateError):
    """Others have ended the process that renders, again and again: nothing is known about the template."""
