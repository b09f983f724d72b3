#!lua flags=allow-oom
-- ARGV: instance id.
remove_generators({ARGV[1]})
next_registry_version()
return 1
