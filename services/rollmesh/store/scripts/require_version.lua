#!lua flags=allow-oom
-- Raises the oldest version that generators may serve, for a trajectory with tokens of a newer version than any of them
-- serves. ARGV: version. Returns 0 unless it was announced and is above the stored one.
if call('HEXISTS', K.versions, ARGV[1]) == 0 then return 0 end
if tonumber(ARGV[1]) <= tonumber(call('HGET', K.desired, 'required_version') or '-1') then return 0 end
call('HSET', K.desired, 'required_version', ARGV[1])
return 1
