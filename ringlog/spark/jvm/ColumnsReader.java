package ringlog.spark;

import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * Reads the records of a partition as columns, one batch per frame.
 *
 * <p>Python describes the frames (Pieces); this class reads them from their files or from the bytes in the
 * description. A batch is valid until the next call of next(), as with every Spark reader.
 */
final class ColumnsReader implements PartitionReader<ColumnarBatch> {
  /** Largest gap (bytes) between two frames of a piece that one read includes instead of skipping it. */
  private static final int GAP_MAX = 128 << 10;

  private final PartitionReader<InternalRow> described;
  private final FrameColumn[] columns;
  private final boolean[] wanted = new boolean[FrameBody.COLUMNS];
  private final ColumnarBatch batch;
  private final FrameBody body = new FrameBody();
  private Chunk chunk = Chunk.get();

  private Pieces pieces;
  private int frame;
  private int hiddenAt;
  private FileChannel channel;
  private String opened;
  private long chunkStart;
  private long chunkEnd;
  private int[] shown = new int[0];

  ColumnsReader(PartitionReader<InternalRow> described, StructType schema, String layout) {
    this.described = described;
    StructField[] fields = schema.fields();
    columns = new FrameColumn[fields.length];
    for (int i = 0; i < fields.length; i++) {
      columns[i] = FrameColumn.of(fields[i].name(), fields[i].dataType(), layout);
      if (columns[i].source() >= 0) {
        wanted[columns[i].source()] = true;
      }
    }
    batch = new ColumnarBatch(columns.clone());
  }

  @Override
  public boolean next() throws IOException {
    while (true) {
      while (pieces == null || frame == pieces.count) {
        if (!described.next()) {
          return false;
        }
        begin(new Pieces(described.get()));
      }
      int rows = open(frame++);
      if (rows > 0) {
        batch.setNumRows(rows);
        return true;
      }
    }
  }

  @Override
  public ColumnarBatch get() {
    return batch;
  }

  @Override
  public CustomTaskMetric[] currentMetricsValues() {
    return described.currentMetricsValues();
  }

  @Override
  public void close() throws IOException {
    try {
      described.close();
    } finally {
      body.close();
      if (chunk != null) {
        chunk.giveBack();
        chunk = null;
      }
      if (channel != null) {
        channel.close();
        channel = null;
      }
    }
  }

  private void begin(Pieces found) throws IOException {
    pieces = found;
    frame = hiddenAt = 0;
    chunkStart = chunkEnd = 0;
    if (found.file != null && !found.file.equals(opened)) {
      if (channel != null) {
        channel.close();
      }
      channel = opened(found);
      opened = found.file;
    }
  }

  /**
   * Open the file of a piece. Tries the descriptor that the Python worker keeps open first, because it works
   * even if the file was deleted.
   */
  private static FileChannel opened(Pieces pieces) throws IOException {
    try {
      Path held = Path.of(pieces.held);
      if (isFileOf(held, pieces)) {
        FileChannel channel = FileChannel.open(held, StandardOpenOption.READ);
        if (isFileOf(held, pieces)) {
          return channel;
        }
        channel.close();
      }
    } catch (IOException e) {
      // The worker has exited, or this process may not access the worker's descriptors.
    }
    try {
      return FileChannel.open(Path.of(pieces.file), StandardOpenOption.READ);
    } catch (NoSuchFileException e) {
      throw new IOException(
          "segment was moved or deleted while it was read; run the query again: " + pieces.place);
    }
  }

  /**
   * Does this descriptor still belong to the file of the piece? The worker closes the oldest of many files, and
   * the kernel reuses the number.
   */
  private static boolean isFileOf(Path held, Pieces pieces) throws IOException {
    String name = Path.of(pieces.file).getFileName().toString();
    return Files.readSymbolicLink(held).getFileName().toString().startsWith(name);
  }

  /** Point the columns at the visible records of a frame. Return the number of these records. */
  private int open(int frame) throws IOException {
    int at = load(frame);
    try {
      body.open(pieces, frame, chunk, at, wanted);
    } catch (FrameBody.Damaged e) {
      long first = FrameBody.firstSeq(pieces, frame);
      long last = FrameBody.lastSeq(pieces, frame);
      throw new IOException(
          "CorruptData: stored frames are damaged: " + e.getMessage() + " (topic=" + pieces.topic
              + ", first_seq=" + first + ", last_seq=" + last + ", file=" + pieces.place
              + ", offset=" + pieces.offset(frame) + ")");
    }
    long base = body.baseSeq;
    int first = (int) Math.max(pieces.firstSeq - base, 0);
    int stop = (int) Math.min(pieces.lastSeq - base + 1, body.count);
    int rows = select(base, first, stop);
    int[] map = rows == stop - first ? null : shown;
    for (FrameColumn each : columns) {
      each.show(body, pieces, first, map);
    }
    return rows;
  }

  /**
   * Return the number of records in [first, stop) that are not hidden. If some are hidden, `shown` lists the
   * others; else `shown` is unchanged.
   */
  private int select(long base, int first, int stop) {
    int hiddenCount = pieces.hiddenCount();
    while (hiddenAt < hiddenCount && pieces.hidden(hiddenAt) < base + first) {
      hiddenAt++;
    }
    if (hiddenAt == hiddenCount || pieces.hidden(hiddenAt) >= base + stop) {
      return Math.max(stop - first, 0);
    }
    if (shown.length < stop) {
      shown = new int[Math.max(stop, 2 * shown.length)];
    }
    int rows = 0;
    for (int i = first; i < stop; i++) {
      if (hiddenAt < hiddenCount && pieces.hidden(hiddenAt) == base + i) {
        hiddenAt++;
      } else {
        shown[rows++] = i;
      }
    }
    return rows;
  }

  /**
   * Load a frame into the chunk, unless it is there already. Return its offset in the chunk. The same read
   * includes as many following frames as fit.
   */
  private int load(int frame) throws IOException {
    long start = pieces.offset(frame);
    long end = start + FrameBody.size(pieces, frame);
    if (start < chunkStart || end > chunkEnd) {
      int next = frame + 1;
      while (next < pieces.count) {
        long begin = pieces.offset(next);
        long stop = begin + FrameBody.size(pieces, next);
        if (stop - start > Chunk.BYTES || begin - end > GAP_MAX || begin < end) {
          break;
        }
        end = stop;
        next++;
      }
      fill(start, (int) (end - start));
    }
    return (int) (start - chunkStart);
  }

  private void fill(long start, int size) throws IOException {
    if (pieces.data != null) {
      chunk.copy(pieces.data, (int) start, size);
    } else if (chunk.read(channel, start, size) < size) {
      throw new IOException(
          "CorruptData: file ends before published position " + (start + size) + " (file=" + pieces.place
              + ")");
    }
    chunkStart = start;
    chunkEnd = start + size;
  }
}
