#!lua flags=allow-oom
-- ARGV: instance id, record (JSON), ttl in milliseconds. Also drops the records that have expired.
for _, id in ipairs(call('ZRANGE', K.generator_expiry, '-inf', '(' .. now(), 'BYSCORE', 'LIMIT', 0, 64)) do
  call('ZREM', K.generator_expiry, id)
  call('HDEL', K.generators, id)
end
call('HSET', K.generators, ARGV[1], ARGV[2])
call('ZADD', K.generator_expiry, now() + tonumber(ARGV[3]), ARGV[1])
return 1
