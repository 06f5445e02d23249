-- A witness that is pushed to cosigns a log once a second. Of those of one minute its last is kept: it says all that the
-- others say. Only rows of the present minute leave, and only behind a larger tree: of what was stored before, nobody
-- can remove anything, nor make this function do it.
CREATE FUNCTION scheduler.supersede_cosignature() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog
AS $$
BEGIN
    DELETE FROM scheduler.checkpoint_cosignature
     WHERE id = (SELECT id FROM scheduler.checkpoint_cosignature
                  WHERE tenant_id = NEW.tenant_id AND witness = NEW.witness AND tree_size < NEW.tree_size
                  ORDER BY tree_size DESC, cosigned_at DESC LIMIT 1)
       AND created_at >= date_trunc('minute', now()) AND created_at <= now();
    RETURN NULL;
END
$$;

CREATE FUNCTION scheduler.refuse_kept_cosignature() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog
AS $$
BEGIN
    IF OLD.created_at >= date_trunc('minute', now()) AND OLD.created_at <= now()
       AND EXISTS (SELECT FROM scheduler.checkpoint_cosignature
                    WHERE tenant_id = OLD.tenant_id AND witness = OLD.witness AND tree_size > OLD.tree_size) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '% of %.% is refused: it is append only', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$;

REVOKE ALL ON FUNCTION scheduler.supersede_cosignature() FROM PUBLIC;
REVOKE ALL ON FUNCTION scheduler.refuse_kept_cosignature() FROM PUBLIC;

DROP TRIGGER append_only_rows ON scheduler.checkpoint_cosignature;
CREATE TRIGGER append_only_rows BEFORE UPDATE ON scheduler.checkpoint_cosignature
    FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_change();
CREATE TRIGGER superseded_rows BEFORE DELETE ON scheduler.checkpoint_cosignature
    FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_kept_cosignature();
CREATE TRIGGER supersede AFTER INSERT ON scheduler.checkpoint_cosignature
    FOR EACH ROW EXECUTE FUNCTION scheduler.supersede_cosignature();
