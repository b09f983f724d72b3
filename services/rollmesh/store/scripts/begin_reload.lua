#!lua flags=allow-oom
-- Takes or renews a lease to load a policy. ARGV: token, leases at once, time to live in milliseconds, 1 to take one above
-- the limit. Returns 1 when the token holds one, else 0; then each holder and the milliseconds until its lease ends.
-- An end after the longest time to live was written before the clock of the host was set back (reap).
local latest = now() + tonumber(ARGV[3])
for _, token in ipairs(call('ZRANGE', K.reloads, '(' .. latest, '+inf', 'BYSCORE', 'LIMIT', 0, 64)) do
  call('ZADD', K.reloads, 'XX', latest, token)
end
call('ZREMRANGEBYSCORE', K.reloads, '-inf', now())
if ARGV[4] == '1' or call('ZSCORE', K.reloads, ARGV[1]) or call('ZCARD', K.reloads) < tonumber(ARGV[2]) then
  call('ZADD', K.reloads, latest, ARGV[1])
  return {1}
end
local reply, holders = {0}, call('ZRANGE', K.reloads, 0, 15, 'WITHSCORES')
for at = 1, #holders, 2 do
  reply[at + 1] = holders[at]
  reply[at + 2] = tonumber(holders[at + 1]) - now()
end
return reply
