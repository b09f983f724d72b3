"""Reference pages in ``docs/reference``, generated from the run file's sections, the registries and the protocols."""
