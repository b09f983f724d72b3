local call = redis.call

local function fail(code, text)
  error({err = code .. ' ' .. text})
end

local clock
local function now()
  if not clock then
    local time = call('TIME')
    clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return clock
end

-- A whole number as text; tostring writes large numbers as 1.7e+12.
local function integer(number)
  return string.format('%d', number)
end

local function words_of(text)
  local words = {}
  for word in string.gmatch(text, '%S+') do words[#words + 1] = word end
  return words
end

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

