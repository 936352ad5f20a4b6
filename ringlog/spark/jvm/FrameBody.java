package ringlog.spark;

import com.github.luben.zstd.Zstd;
import java.io.IOException;
import java.nio.ByteBuffer;
import net.jpountz.lz4.LZ4Exception;
import net.jpountz.lz4.LZ4Factory;
import org.apache.spark.unsafe.Platform;

/**
 * The columns of one frame in memory (docs/reference/format.md, "Body of an append").
 *
 * <p>No byte is used before the checksum was verified. No offset is used before it was checked to lie
 * inside the body.
 */
final class FrameBody {
  /** Column numbers. COLUMNS is the number of columns without validity bitmaps. */
  static final int PAYLOAD = 0;

  static final int KEY = 1;
  static final int TAG = 2;
  static final int NODE = 3;
  static final int HEADERS = 4;
  static final int META = 5;
  static final int EVENT_TS = 6;
  static final int EXPIRES_AT = 7;
  static final int NOT_BEFORE = 8;
  static final int PRIORITY = 9;
  static final int COMMIT_TS = 10;
  static final int COLUMNS = 11;

  /** Bit VALID + c of the column bitmap is set if column c, below NULLABLE, has a validity bitmap. */
  private static final int VALID = 11;

  private static final int NULLABLE = 4;
  private static final int VERSION_FIRST = 1;

  /** Indexes of 8-byte header words: byte offset in the header (docs/reference/format.md, "Header") / 8. */
  private static final int W_HEAD = 0;

  private static final int W_BASE_SEQ = 2;
  private static final int W_COMMIT_TS = 3;
  private static final int W_COUNT = 4;
  private static final int W_TAIL = 7;
  private static final int W_BODY = 8;

  static final int HEADER_BYTES = 80;
  private static final int LENGTH_FIELD = 4;
  private static final int CODEC_NONE = 0;
  private static final int CODEC_LZ4 = 1;

  /**
   * Address of each column, 0 if it is absent. For a bytes column `offsets` has the address of its offsets,
   * and `starts` that of its bytes. Both are always 0 for HEADERS.
   */
  final long[] starts = new long[COLUMNS];

  final long[] offsets = new long[COLUMNS];

  /** Address of each column's validity bitmap, 0 if it has none. */
  final long[] valid = new long[NULLABLE];

  /**
   * True if an empty key, tag or node is null. Format version 1, which has no validity, defines it that
   * way.
   */
  boolean isEmptyNull;

  int count;
  long baseSeq;
  long commitTs;
  private int columns;
  private Chunk raw;

  /** Return the size of a frame in bytes, header included. */
  static long size(Pieces pieces, int frame) {
    return (pieces.header(frame, W_HEAD) & 0xFFFFFFFFL) + LENGTH_FIELD;
  }

  /** Return the seq of a frame's first record. */
  static long firstSeq(Pieces pieces, int frame) {
    return pieces.header(frame, W_BASE_SEQ);
  }

  /** Return the seq of a frame's last record. */
  static long lastSeq(Pieces pieces, int frame) {
    return firstSeq(pieces, frame) + (pieces.header(frame, W_COUNT) & 0xFFFFFFFFL) - 1;
  }

  /**
   * Verify the frame at offset `at` of a chunk and find its columns. Throws Damaged if the body does not
   * match the checksum in the header, or is not valid.
   */
  void open(Pieces pieces, int frame, Chunk chunk, int at, boolean[] wanted) throws Damaged {
    int length = (int) size(pieces, frame) - HEADER_BYTES;
    long body = chunk.address + at + HEADER_BYTES;
    if (Xxh3.of(body, length) != pieces.header(frame, W_BODY)) {
      throw new Damaged("body does not match its checksum");
    }
    columns = (int) (pieces.header(frame, W_HEAD) >>> 48);
    isEmptyNull = (pieces.header(frame, W_HEAD) >>> 40 & 0xFF) == VERSION_FIRST;
    baseSeq = pieces.header(frame, W_BASE_SEQ);
    commitTs = pieces.header(frame, W_COMMIT_TS);
    count = (int) pieces.header(frame, W_COUNT);
    long tail = pieces.header(frame, W_TAIL);
    int rawLength = (int) tail;
    int codec = (int) (tail >>> 32) & 0xFF;
    if (codec != CODEC_NONE) {
      body = unpacked(chunk, at + HEADER_BYTES, length, rawLength, codec);
      length = rawLength;
    }
    place(body, length, wanted);
  }

  private long unpacked(Chunk chunk, int at, int length, int rawLength, int codec) throws Damaged {
    long packed = length < 8 ? -1 : Platform.getLong(null, chunk.address + at);
    boolean isPlausible = packed > 0 && packed <= length - 8 && rawLength >= 8 && rawLength / 1000 <= packed;
    if (!isPlausible) {
      throw new Damaged(
          "compressed body has impossible lengths: compressed=" + packed + ", uncompressed=" + rawLength
              + ", stored=" + length);
    }
    if (raw == null) {
      raw = Chunk.get();
    }
    raw.reserve(rawLength);
    ByteBuffer from = chunk.view(at + 8, (int) packed);
    ByteBuffer to = raw.view(0, rawLength);
    try {
      if (codec == CODEC_LZ4) {
        LZ4Factory.fastestInstance().safeDecompressor().decompress(from, to);
      } else {
        to.position(Zstd.decompress(to, from));
      }
    } catch (LZ4Exception | com.github.luben.zstd.ZstdException e) {
      throw new Damaged("body does not decompress (codec=" + codec + "): " + e.getMessage());
    }
    if (to.position() != rawLength) {
      throw new Damaged("body decompresses to " + to.position() + " bytes, expected " + rawLength);
    }
    return raw.address;
  }

  /** Find the start of each column. Check all offsets only for the `wanted` columns. */
  private void place(long body, int length, boolean[] wanted) throws Damaged {
    long at = body;
    long end = body + length;
    for (int column = 0; column < COLUMNS; column++) {
      starts[column] = offsets[column] = 0;
      if ((columns >>> column & 1) == 0) {
        continue;
      }
      if (column >= EVENT_TS) {
        starts[column] = at;
        at = block(at, end, (column == PRIORITY ? 1L : 8L) * count);
      } else if (column == HEADERS) {
        long entries = lastOf(at, end, count);
        at = block(at, end, 4L * (count + 1));
        for (int part = 0; part < 2; part++) {
          long bytes = lastOf(at, end, entries);
          at = block(at, end, 4L * (entries + 1));
          at = block(at, end, bytes);
        }
      } else {
        offsets[column] = at;
        long bytes = lastOf(at, end, count);
        at = block(at, end, 4L * (count + 1));
        starts[column] = at;
        at = block(at, end, bytes);
        if (wanted[column]) {
          checkOffsets(offsets[column]);
        }
      }
    }
    for (int column = 0; column < NULLABLE; column++) {
      valid[column] = 0;
      if ((columns >>> VALID + column & 1) != 0) {
        valid[column] = at;
        at = block(at, end, (count + 7L) / 8);
      }
    }
    if (columns >>> VALID + NULLABLE != 0 || at != end) {
      throw new Damaged("columns do not fill the body");
    }
  }

  private static long block(long at, long end, long size) throws Damaged {
    long next = at + (size + 7 & ~7L);
    if (size < 0 || next > end) {
      throw new Damaged("column runs past the body");
    }
    return next;
  }

  private static long lastOf(long at, long end, long entries) throws Damaged {
    if (entries < 0 || at + 4 * entries + 4 > end) {
      throw new Damaged("column runs past the body");
    }
    return Platform.getInt(null, at + 4 * entries);
  }

  private void checkOffsets(long at) throws Damaged {
    int before = Platform.getInt(null, at);
    int bad = before;
    for (int i = 1; i <= count; i++) {
      int next = Platform.getInt(null, at + 4L * i);
      bad |= next | next - before; // `next` itself: a difference of a negative number may overflow.
      before = next;
    }
    if (bad < 0 || Platform.getInt(null, at) != 0) {
      throw new Damaged("offsets must start at 0 and not decrease");
    }
  }

  void close() {
    if (raw != null) {
      raw.giveBack();
      raw = null;
    }
  }

  /** A stored frame is damaged. The message states the reason. */
  static final class Damaged extends IOException {
    private static final long serialVersionUID = 1L;

    Damaged(String reason) {
      super(reason);
    }
  }
}
