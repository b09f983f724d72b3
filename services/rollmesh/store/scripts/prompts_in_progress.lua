#!lua flags=no-writes,allow-oom
-- Returns the record name of each unfinished group that has one: of open groups, and of those that are set aside.
local names = {}
for _, queue in ipairs({K.open, K.aside}) do
  for _, gid in ipairs(call('ZRANGE', queue, 0, -1)) do
    local name = call('HGET', group_key(gid), 'prompt')
    if name then names[#names + 1] = name end
  end
end
return names
