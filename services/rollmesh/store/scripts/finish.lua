#!lua
-- uses: fence group save
-- Last tokens and finish reason: leased -> finished. ARGV and reply as in append.
check_versions(3, tonumber(ARGV[2]))
local reply, at, lengths = {}, 3, {}
for _ = 1, tonumber(ARGV[2]) do
  local status, tokens, fields, state = save(ARGV[1], at)
  if status == SAVED and state == 'leased' then
    local n = #fields
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'state', 'finished', 'finish', ARGV[at + 5]
    call('HSET', trajectory_key(ARGV[at]), unpack(fields))
    count('leased', -1)
    count('finished', 1)
    count('finished_total', 1)
    local bucket = length_bucket(tokens)
    lengths[bucket] = (lengths[bucket] or 0) + 1
  elseif status == DUPLICATE and state == 'leased' then
    status = REFUSED
  end
  reply[#reply + 1] = status
  reply[#reply + 1] = tokens
  at = at + ITEM_HEAD + tonumber(ARGV[at + 7])
end
for bucket, n in pairs(lengths) do call('HINCRBY', K.lengths, bucket, n) end
flush_counts()
return reply
