package ringlog.spark;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.Platform;

/**
 * One piece as Python describes it: frames of one topic in ascending order, and which of their records are
 * visible. SCHEMA equals SCHEMA in ringlog/spark/jvm_frames.py.
 */
final class Pieces {
  /** Option that requests pieces from Python. Its value is the user's schema as JSON, or empty. */
  static final String WISH = "pieces.of";

  static final StructType SCHEMA =
      new StructType()
          .add("topic", DataTypes.StringType)
          .add("epoch", DataTypes.LongType)
          .add("first_seq", DataTypes.LongType)
          .add("last_seq", DataTypes.LongType)
          .add("place", DataTypes.StringType)
          .add("file", DataTypes.StringType)
          .add("held", DataTypes.StringType)
          .add("data", DataTypes.BinaryType)
          .add("frames", DataTypes.BinaryType)
          .add("hidden", DataTypes.BinaryType);

  /** Words of 8 bytes per frame: its offset, then its header. */
  static final int WORDS = 11;

  final String topic;
  final long epoch;
  /** First and last seq of this piece. Records of the frames outside this range belong to another task. */
  final long firstSeq;
  final long lastSeq;
  /** Path of the file for error messages. */
  final String place;
  /**
   * `file`: path of the file to read. `held`: /proc path of the descriptor that the Python worker keeps
   * open for it. If both are null, `data` contains the frames.
   */
  final String file;
  final String held;
  final byte[] data;
  final int count;
  private final byte[] frames;
  private final byte[] hidden;

  Pieces(InternalRow row) {
    topic = row.getUTF8String(0).toString();
    epoch = row.getLong(1);
    firstSeq = row.getLong(2);
    lastSeq = row.getLong(3);
    place = row.getUTF8String(4).toString();
    file = row.isNullAt(5) ? null : row.getUTF8String(5).toString();
    held = row.isNullAt(6) ? null : row.getUTF8String(6).toString();
    data = row.isNullAt(7) ? null : row.getBinary(7);
    frames = row.getBinary(8);
    hidden = row.getBinary(9);
    count = frames.length / (8 * WORDS);
  }

  /** Return the byte offset of a frame in the file or in `data`. */
  long offset(int frame) {
    return word(frame, 0);
  }

  /** Return a word of a frame's header. Python has verified the header. */
  long header(int frame, int index) {
    return word(frame, 1 + index);
  }

  private long word(int frame, int index) {
    return Platform.getLong(frames, Platform.BYTE_ARRAY_OFFSET + 8L * (WORDS * frame + index));
  }

  /** Return the number of hidden records. hidden(i) returns their seqs in ascending order. */
  int hiddenCount() {
    return hidden.length / 8;
  }

  long hidden(int index) {
    return Platform.getLong(hidden, Platform.BYTE_ARRAY_OFFSET + 8L * index);
  }
}
