package ringlog.spark;

import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.types.StructType;

/**
 * Wraps the stream of the Python source. Tasks read columns from pieces; all other calls are delegated.
 *
 * <p>The methods are written out, because a runtime proxy would turn Spark's checked exceptions into others.
 */
final class ColumnsStream implements MicroBatchStream, SupportsTriggerAvailableNow {
  private final MicroBatchStream pieces;
  private final SupportsTriggerAvailableNow limits;
  private final StructType wanted;
  private final String layout;

  /**
   * `pieces` must come from a Python reader that supports read limits and availableNow, as ringlog's does.
   */
  ColumnsStream(MicroBatchStream pieces, StructType wanted, String layout) {
    this.pieces = pieces;
    this.limits = (SupportsTriggerAvailableNow) pieces;
    this.wanted = wanted;
    this.layout = layout;
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new ColumnsFactory(pieces.createReaderFactory(), wanted, layout);
  }

  @Override
  public InputPartition[] planInputPartitions(Offset start, Offset end) {
    return pieces.planInputPartitions(start, end);
  }

  @Override
  public Offset initialOffset() {
    return pieces.initialOffset();
  }

  @Override
  public Offset latestOffset() {
    return pieces.latestOffset();
  }

  @Override
  public Offset latestOffset(Offset start, ReadLimit limit) {
    return limits.latestOffset(start, limit);
  }

  @Override
  public Offset reportLatestOffset() {
    return limits.reportLatestOffset();
  }

  @Override
  public ReadLimit getDefaultReadLimit() {
    return limits.getDefaultReadLimit();
  }

  @Override
  public void prepareForTriggerAvailableNow() {
    limits.prepareForTriggerAvailableNow();
  }

  @Override
  public Offset deserializeOffset(String json) {
    return pieces.deserializeOffset(json);
  }

  @Override
  public void commit(Offset end) {
    pieces.commit(end);
  }

  @Override
  public void stop() {
    pieces.stop();
  }

  @Override
  public String toString() {
    return pieces.toString();
  }
}
