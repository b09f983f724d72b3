#!lua flags=allow-oom
-- Writes the record of a generator and removes expired records. ARGV: instance id, record (JSON), ttl in milliseconds.
local expired = call('ZRANGE', K.generator_expiry, '-inf', '(' .. now(), 'BYSCORE', 'LIMIT', 0, 64)
if #expired > 0 then remove_generators(expired) end
call('HSET', K.generators, ARGV[1], ARGV[2])
-- The longest time to live: a later expiry was written before the clock of the host was set back (reap).
if tonumber(ARGV[3]) > tonumber(call('HGET', K.meta, 'generator_ttl_ms') or '0') then
  call('HSET', K.meta, 'generator_ttl_ms', ARGV[3])
end
call('ZADD', K.generator_expiry, now() + tonumber(ARGV[3]), ARGV[1])
call('ZADD', K.generator_changes, next_registry_version(), ARGV[1])
return 1
