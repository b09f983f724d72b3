#!lua
-- Saves tokens of leased trajectories, and with them marks of the sessions of agents that they are in. ARGV: session,
-- number of items, then the items (lib/save.lua).
-- Returns (status, saved tokens) per item.
local items, reply = read_items(3, tonumber(ARGV[2])), {}
check(items)
for _, item in ipairs(items) do
  local status, tokens, fields, state = save(ARGV[1], item)
  if fields and #fields > 0 then call('HSET', trajectory_key(item.id), unpack(fields)) end
  if item.mark and (status == SAVED or status == DUPLICATE) and state == S.leased then
    keep_agent(ARGV[1], item.id, item.mark, item.agent[1], item.agent[2])
  end
  reply[#reply + 1] = status
  reply[#reply + 1] = tokens
end
flush_counts()
return reply
