package ringlog.spark;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.Platform;

/**
 * One piece, as Python describes it: frames of one topic, ascending, and what is to be seen of them. The
 * columns are those of ringlog/spark/jvm_frames.py.
 */
final class Pieces {
  /** The option that asks Python for pieces; its value is the schema that the user gave, or nothing. */
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

  /** Words of a frame: where it begins, then its header. */
  static final int WORDS = 11;

  final String topic;
  final long epoch;
  /** Records below and above these are another task's. */
  final long firstSeq;
  final long lastSeq;
  /** How the file is called where people look for it. */
  final String place;
  /** The file to read, and a descriptor of it that a Python worker holds open; null = `data` has it all. */
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

  /** Where a frame begins, in the file or in `data`. */
  long offset(int frame) {
    return word(frame, 0);
  }

  /** A word of a frame's header, as it was sealed. */
  long header(int frame, int index) {
    return word(frame, 1 + index);
  }

  private long word(int frame, int index) {
    return Platform.getLong(frames, Platform.BYTE_ARRAY_OFFSET + 8L * (WORDS * frame + index));
  }

  /** Numbers that are not to be seen, ascending. */
  int hiddenCount() {
    return hidden.length / 8;
  }

  long hidden(int index) {
    return Platform.getLong(hidden, Platform.BYTE_ARRAY_OFFSET + 8L * index);
  }
}
