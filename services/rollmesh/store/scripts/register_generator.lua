#!lua flags=allow-oom
-- uses: core registry
-- Writes the record of a generator and removes expired records. ARGV: instance id, record (JSON), ttl in milliseconds.
local expired = call('ZRANGE', K.generator_expiry, '-inf', '(' .. now(), 'BYSCORE', 'LIMIT', 0, 64)
if #expired > 0 then remove_generators(expired) end
call('HSET', K.generators, ARGV[1], ARGV[2])
call('ZADD', K.generator_expiry, now() + tonumber(ARGV[3]), ARGV[1])
call('ZADD', K.generator_changes, next_registry_version(), ARGV[1])
return 1
