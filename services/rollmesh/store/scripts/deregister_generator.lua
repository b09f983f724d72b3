#!lua flags=allow-oom
-- Removes the record of a generator. ARGV: instance id.
remove_generators({ARGV[1]})
next_registry_version()
return 1
