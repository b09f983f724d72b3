-- Counter changes are summed and written once per script.
local deltas, delta_count = {}, 0
local function count(name, by)
  if not deltas[name] then
    deltas[name] = 0
    delta_count = delta_count + 1
  end
  deltas[name] = deltas[name] + by
end

local function flush_counts()
  if delta_count == 0 then return end
  for name, by in pairs(deltas) do
    if by ~= 0 then call('HINCRBY', K.counts, name, by) end
  end
  deltas, delta_count = {}, 0
end
