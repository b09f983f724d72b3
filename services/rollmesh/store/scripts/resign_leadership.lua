#!lua flags=allow-oom
-- Releases the leadership lease. ARGV: token. Returns 1 when it led.
if call('HGET', K.meta, 'leader') ~= ARGV[1] then return 0 end
call('HDEL', K.meta, 'leader', 'leader_until', 'leader_since', 'leader_name')
return 1
