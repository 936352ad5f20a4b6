package ringlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A Spark column that reads directly from the frame that the reader opened last. It copies only binary
 * values and short texts (Texts).
 */
abstract class FrameColumn extends ColumnVector {
  /** Visible records of the frame: row r is record `shown[r]`, or `first + r` if `shown` is null. */
  protected int first;

  protected int[] shown;

  FrameColumn(DataType type) {
    super(type);
  }

  /** Switch to the visible records of another frame. */
  void show(FrameBody body, Pieces pieces, int first, int[] shown) {
    this.first = first;
    this.shown = shown;
    turn(body, pieces);
  }

  /** Read from the frame the addresses and values that this column needs. */
  protected abstract void turn(FrameBody body, Pieces pieces);

  protected final int record(int row) {
    return shown == null ? first + row : shown[row];
  }

  /**
   * Return the column with this name. `partition` and `timestampType` exist only in the Kafka layout and are
   * always 0. Throws IllegalArgumentException for an unknown name.
   */
  static FrameColumn of(String name, DataType type, String layout) {
    switch (name) {
      case "topic":
        return new Topic(type);
      case "epoch":
        return new Number(type, true);
      case "partition":
      case "timestampType":
        return new Number(type, false);
      case "seq":
      case "offset":
        return new Seq(type);
      case "ts":
      case "timestamp":
        return new Stamp(type);
      case "value":
      case "payload":
        return new Bytes(type, FrameBody.PAYLOAD);
      case "key":
        return new Bytes(type, FrameBody.KEY);
      case "tag":
        return new Bytes(type, FrameBody.TAG);
      case "node":
        return new Bytes(type, FrameBody.NODE);
      case "meta":
        return new Bytes(type, FrameBody.META);
      case "event_ts":
        return new Instant(type, FrameBody.EVENT_TS, Long.MIN_VALUE);
      case "expires_at":
        return new Instant(type, FrameBody.EXPIRES_AT, 0);
      case "not_before":
        return new Instant(type, FrameBody.NOT_BEFORE, 0);
      case "priority":
        return new Priority(type);
      default:
        throw new IllegalArgumentException("no such column: " + name + " (layout=" + layout + ")");
    }
  }

  /** Return the number of the frame's column that this column reads; -1 if it needs none. */
  int source() {
    return -1;
  }

  /** The topic's name, converted only if it changed. */
  private static final class Topic extends FrameColumn {
    private String text = "";
    private UTF8String name = UTF8String.EMPTY_UTF8;

    Topic(DataType type) {
      super(type);
    }

    @Override
    protected void turn(FrameBody body, Pieces pieces) {
      if (!pieces.topic.equals(text)) {
        text = pieces.topic;
        name = UTF8String.fromString(text);
      }
    }

    @Override
    public UTF8String getUTF8String(int row) {
      return name;
    }
  }

  /** The epoch, or the constant 0. */
  private static final class Number extends FrameColumn {
    private final boolean isEpoch;
    private long value;

    Number(DataType type, boolean isEpoch) {
      super(type);
      this.isEpoch = isEpoch;
    }

    @Override
    protected void turn(FrameBody body, Pieces pieces) {
      value = isEpoch ? pieces.epoch : 0;
    }

    @Override
    public long getLong(int row) {
      return value;
    }

    @Override
    public int getInt(int row) {
      return (int) value;
    }
  }

  private static final class Seq extends FrameColumn {
    private long base;

    Seq(DataType type) {
      super(type);
    }

    @Override
    protected void turn(FrameBody body, Pieces pieces) {
      base = body.baseSeq;
    }

    @Override
    public long getLong(int row) {
      return base + record(row);
    }
  }

  /** Commit time: one per record if the frame merges several commits (column 10), else one per frame. */
  private static final class Stamp extends FrameColumn {
    private long one;
    private long each;

    Stamp(DataType type) {
      super(type);
    }

    @Override
    protected void turn(FrameBody body, Pieces pieces) {
      one = body.commitTs;
      each = body.starts[FrameBody.COMMIT_TS];
    }

    @Override
    public long getLong(int row) {
      return each == 0 ? one : Platform.getLong(null, each + 8L * record(row));
    }

    @Override
    int source() {
      return FrameBody.COMMIT_TS;
    }
  }

  /** A nullable point in time. */
  private static final class Instant extends FrameColumn {
    private final int column;
    private final long none;
    private long each;

    Instant(DataType type, int column, long none) {
      super(type);
      this.column = column;
      this.none = none;
    }

    @Override
    protected void turn(FrameBody body, Pieces pieces) {
      each = body.starts[column];
    }

    @Override
    public boolean isNullAt(int row) {
      return each == 0 || getLong(row) == none;
    }

    @Override
    public boolean hasNull() {
      return true;
    }

    @Override
    public long getLong(int row) {
      return Platform.getLong(null, each + 8L * record(row));
    }

    @Override
    int source() {
      return column;
    }
  }

  private static final class Priority extends FrameColumn {
    private long each;

    Priority(DataType type) {
      super(type);
    }

    @Override
    protected void turn(FrameBody body, Pieces pieces) {
      each = body.starts[FrameBody.PRIORITY];
    }

    @Override
    public short getShort(int row) {
      return each == 0 ? 0 : (short) (Platform.getByte(null, each + record(row)) & 0xFF);
    }

    @Override
    int source() {
      return FrameBody.PRIORITY;
    }
  }

  /** Nullable bytes or text. */
  private static final class Bytes extends FrameColumn {
    private final int column;
    private final Texts texts;
    private long offsets;
    private long start;
    private long valid;
    private boolean isEmptyNull;

    Bytes(DataType type, int column) {
      super(type);
      this.column = column;
      texts = type instanceof StringType ? new Texts() : null;
    }

    @Override
    protected void turn(FrameBody body, Pieces pieces) {
      offsets = body.offsets[column];
      start = body.starts[column];
      valid = column <= FrameBody.NODE ? body.valid[column] : 0;
      isEmptyNull = column == FrameBody.META || column != FrameBody.PAYLOAD && body.isEmptyNull;
    }

    @Override
    public boolean hasNull() {
      return offsets == 0 || valid != 0 || isEmptyNull;
    }

    @Override
    public boolean isNullAt(int row) {
      if (offsets == 0) {
        return true;
      }
      if (valid != 0) {
        int record = record(row);
        return (Platform.getByte(null, valid + (record >>> 3)) >>> (record & 7) & 1) == 0;
      }
      if (!isEmptyNull) {
        return false;
      }
      long at = offsets + 4L * record(row);
      return Platform.getInt(null, at) == Platform.getInt(null, at + 4);
    }

    @Override
    public UTF8String getUTF8String(int row) {
      long at = offsets + 4L * record(row);
      int from = Platform.getInt(null, at);
      return texts.at(start + from, Platform.getInt(null, at + 4) - from);
    }

    @Override
    public byte[] getBinary(int row) {
      long at = offsets + 4L * record(row);
      int from = Platform.getInt(null, at);
      byte[] found = new byte[Platform.getInt(null, at + 4) - from];
      Platform.copyMemory(null, start + from, found, Platform.BYTE_ARRAY_OFFSET, found.length);
      return found;
    }

    @Override
    int source() {
      return column;
    }
  }

  // Defaults. Accessors of a type that the column does not have throw UnsupportedOperationException.

  @Override
  public void close() {}

  @Override
  public boolean hasNull() {
    return false;
  }

  @Override
  public int numNulls() {
    return hasNull() ? 1 : 0;
  }

  @Override
  public boolean isNullAt(int row) {
    return false;
  }

  private UnsupportedOperationException other() {
    return new UnsupportedOperationException(
        "this accessor does not support a column of type " + dataType().catalogString());
  }

  @Override
  public boolean getBoolean(int row) {
    throw other();
  }

  @Override
  public byte getByte(int row) {
    throw other();
  }

  @Override
  public short getShort(int row) {
    throw other();
  }

  @Override
  public int getInt(int row) {
    throw other();
  }

  @Override
  public long getLong(int row) {
    throw other();
  }

  @Override
  public float getFloat(int row) {
    throw other();
  }

  @Override
  public double getDouble(int row) {
    throw other();
  }

  @Override
  public ColumnarArray getArray(int row) {
    throw other();
  }

  @Override
  public ColumnarMap getMap(int row) {
    throw other();
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    throw other();
  }

  @Override
  public UTF8String getUTF8String(int row) {
    throw other();
  }

  @Override
  public byte[] getBinary(int row) {
    throw other();
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    throw other();
  }
}
