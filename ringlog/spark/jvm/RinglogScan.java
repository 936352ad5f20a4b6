package ringlog.spark;

import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;

/** A scan over pieces. It creates only the columns that the query uses. */
final class RinglogScan implements SupportsPushDownRequiredColumns, Scan, Batch {
  private final Scan pieces;
  private final String layout;
  private StructType wanted;
  private Batch batch;

  RinglogScan(Scan pieces, StructType schema, String layout) {
    this.pieces = pieces;
    this.wanted = schema;
    this.layout = layout;
  }

  /**
   * Restrict the scan to these columns. The plan does not depend on columns, so all scans of one load share
   * it even if their columns differ.
   */
  @Override
  public void pruneColumns(StructType required) {
    wanted = required;
  }

  @Override
  public Scan build() {
    return this;
  }

  @Override
  public StructType readSchema() {
    return wanted;
  }

  @Override
  public String description() {
    return "ringlog " + wanted.catalogString();
  }

  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return ColumnarSupportMode.SUPPORTED;
  }

  @Override
  public Batch toBatch() {
    return this;
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return batch().planInputPartitions();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new ColumnsFactory(batch().createReaderFactory(), wanted, layout);
  }

  private Batch batch() {
    if (batch == null) {
      batch = pieces.toBatch();
    }
    return batch;
  }

  @Override
  public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
    return new ColumnsStream(pieces.toMicroBatchStream(checkpointLocation), wanted, layout);
  }
}
