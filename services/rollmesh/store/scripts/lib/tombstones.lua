-- A tombstone takes about 100 bytes, so their number is bounded, regardless of the number of drops in a train step.
local MOST_TOMBSTONES = 65536

-- Replaces old tombstones by a floor: every prompt position up to the floor counts as admitted. Every position below the
-- cursor was admitted, so a floor below the cursor covers no other position. A tombstone past the cursor (Redis came back
-- with a state before its admission) stays until the cursor has passed it.
local function forget_tombstones(first_kept, most)
  local surplus = call('ZCARD', K.tombstones) - MOST_TOMBSTONES
  local oldest = call('ZRANGE', K.tombstones, 0, most - 1, 'WITHSCORES')
  local meta
  for at = 1, #oldest, 2 do
    local gid = oldest[at]
    if tonumber(oldest[at + 1]) >= first_kept and at > 2 * surplus then break end
    meta = meta or call('HMGET', K.meta, 'floor_epoch', 'floor_index', 'cursor_epoch', 'cursor_index', 'trained_step')
    local epoch, index = string.match(gid, '^e(%d+)%-(%d+)$')
    epoch, index = tonumber(epoch), tonumber(index)
    local cursor_epoch, cursor_index = tonumber(meta[3]), tonumber(meta[4])
    if epoch and (epoch > cursor_epoch or (epoch == cursor_epoch and index >= cursor_index)) then
      call('ZADD', K.tombstones, meta[5], gid)
    else
      local floor_epoch, floor_index = tonumber(meta[1] or '-1'), tonumber(meta[2] or '-1')
      if epoch and (epoch > floor_epoch or (epoch == floor_epoch and index > floor_index)) then
        meta[1], meta[2] = epoch, index
      end
      call('ZREM', K.tombstones, gid)
    end
  end
  if meta and meta[1] then call('HSET', K.meta, 'floor_epoch', meta[1], 'floor_index', meta[2]) end
end
