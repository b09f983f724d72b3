#!lua flags=allow-oom
-- ARGV: instance id.
call('HDEL', K.generators, ARGV[1])
return call('ZREM', K.generator_expiry, ARGV[1])
