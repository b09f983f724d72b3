#!lua flags=no-writes,allow-oom
-- Returns the records of live generators written after a registry version. ARGV: version; 0 returns all records.
-- The reply is the version, the number of live generators, 1 when it has all of them, then (milliseconds to live, record)
-- each.
local after, newest = tonumber(ARGV[1]), call('HGET', K.desired, 'registry_version') or '0'
local reply = {newest, call('ZCOUNT', K.generator_expiry, now(), '+inf'), 0}
local ids
if after == 0 or after > tonumber(newest) then
  reply[3] = 1
  ids = call('ZRANGE', K.generator_expiry, now(), '+inf', 'BYSCORE')
else
  ids = call('ZRANGE', K.generator_changes, '(' .. ARGV[1], '+inf', 'BYSCORE')
end
in_slices(ids, function(...)
  local records, ends = call('HMGET', K.generators, ...), call('ZMSCORE', K.generator_expiry, ...)
  for at, record in ipairs(records) do
    local left = (tonumber(ends[at] or '0')) - now()
    if record and left >= 0 then
      reply[#reply + 1] = left
      reply[#reply + 1] = record
    end
  end
end)
return reply
