#!lua flags=allow-oom
-- Deletes the records of a large group that left the queue, one slice per call; the last call records the drop.
-- ARGV: group, slice size. Returns 1 while another call is needed.
local gid = ARGV[1]
local before = call('HGET', K.dropped, gid)
if not before then return 0 end
local first, total, longest, wasted, launched, reason = string.match(before, '^(%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
first, total, longest, wasted = tonumber(first), tonumber(total), tonumber(longest), tonumber(wasted)
launched = tonumber(launched)
local last, keys = math.min(first + tonumber(ARGV[2]), launched) - 1, {}
for member = first, last do
  local tokens, before_drop = take_out_member(gid .. '.' .. member, keys)
  total, longest, wasted = total + tokens, math.max(longest, tokens), wasted + before_drop
end
if last + 1 >= launched then
  keys[#keys + 1], keys[#keys + 2] = group_key(gid), prompt_key(gid)
  call('HDEL', K.dropped, gid)
  if reason ~= '' then note_drop(gid, reason, total, longest, wasted) end
else
  local words = {integer(last + 1), integer(total), integer(longest), integer(wasted), integer(launched), reason}
  call('HSET', K.dropped, gid, table.concat(words, ' '))
end
unlink(keys)
flush_counts()
return last + 1 < launched and 1 or 0
