"""``custom_generate`` from the Hub: hands everything on to the package lookahead-decoding.

transformers calls this function with the arguments of ``model.generate`` as they were given, before it has prepared
any. So the call begins anew, now with the package's own function, for which transformers does prepare them.
"""

# transformers looks for imports outside of try, and would advise to install a package of the module's name.
try:
    import lookahead
except ImportError as error:
    raise ImportError(
        "this custom_generate needs the package lookahead-decoding, which cannot be imported here "
        f"({error}); pip install lookahead-decoding"
    ) from error


def generate(model, **arguments):
    """What ``model.generate`` returns for these arguments; ``drafter`` chooses how to draft."""
    return model.generate(**arguments, custom_generate=lookahead.generate)
