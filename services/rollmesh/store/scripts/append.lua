#!lua
-- Saves tokens of leased trajectories. ARGV: session, number of items, then the items (lib/save.lua).
-- Returns (status, saved tokens) per item.
local items, reply = read_items(3, tonumber(ARGV[2])), {}
check(items)
for _, item in ipairs(items) do
  local status, tokens, fields = save(ARGV[1], item)
  if fields and #fields > 0 then call('HSET', trajectory_key(item.id), unpack(fields)) end
  reply[#reply + 1] = status
  reply[#reply + 1] = tokens
end
flush_counts()
return reply
