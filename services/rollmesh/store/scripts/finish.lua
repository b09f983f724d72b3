#!lua
-- Saves the last tokens and the finish reason: leased -> finished. ARGV and reply as in append.
local items, reply, lengths = read_items(3, tonumber(ARGV[2])), {}, {}
check(items)
for _, item in ipairs(items) do
  local status, tokens, fields, state = save(ARGV[1], item)
  if status == SAVED and state == S.leased then
    local n = #fields
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'state', S.finished, 'finish', item.finish
    call('HSET', trajectory_key(item.id), unpack(fields))
    count('leased', -1)
    count('finished', 1)
    count('finished_total', 1)
    local bucket = length_bucket(tokens)
    lengths[bucket] = (lengths[bucket] or 0) + 1
  elseif status == DUPLICATE and state == S.leased then
    status = REFUSED
  end
  reply[#reply + 1] = status
  reply[#reply + 1] = tokens
end
for bucket, n in pairs(lengths) do call('HINCRBY', K.lengths, bucket, n) end
flush_counts()
return reply
